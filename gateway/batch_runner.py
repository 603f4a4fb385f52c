"""Runs batches: an owned loop in every gateway.

1. `run` claims batches that nobody runs, as many as fit, and holds each by a lease.
2. A new batch is validated: every line before any runs. A bad one ends as `failed` with what is wrong.
3. Its lines go the ordinary path, as the key that made the batch and in tier `batch`, some at a time. A line
   that finds no room waits and tries again; one that is refused for its content, or that fails again and
   again, goes to the error file.
4. When no line is left, or the window is over, or somebody cancels: what was answered goes to the output
   file, the rest to the error file, in one transaction with the end of the batch.

A gateway that stops gives its batches back; those of one that died are claimed when the lease is over, and
the lines that ran there run again. The id of a line's request is written before the request begins, so
whoever runs the line again sees whether it was paid: then the answer, which nobody has, is made again for
nothing.
"""

import asyncio
import datetime as dt
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Protocol

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts.errors import InvalidApiKey, NoCapacity, ServingError, openai_body
from gateway.auth import DATABASE_ERRORS
from gateway.batch_lines import Line, LineChecker, LineError, lines_of, output_line, unanswered_line
from gateway.batches import Batch, Batches, LineRow, RunnerReplaced
from gateway.files import Files
from gateway.outputs import WholeAnswer
from gateway.starter import Arrival, Started
from gateway.tenants import ApiKey

log = structlog.get_logger()

LEASE: Final = dt.timedelta(seconds=15)
LOOK_S: Final = 1.0
CLAIM_S: Final = 5.0  # what was created here is claimed at once; this is for what another gateway left
MAX_FAILURES: Final = 5  # of one line through a fault of ours
MAX_BATCHES: Final = 16  # at once in one gateway
_LONGEST_WAIT_S: Final = 30.0
_READ_ROWS: Final = 200
_RELEASE_S: Final = 1.0
_SETTLED_S: Final = 1.0  # between two looks for whether a request was settled
_AGAIN: Final = frozenset({429, 500, 503, 504})
_COUNTED: Final = frozenset({500, 504})  # may be the line's own fault; waiting for room is not
_UNANSWERED: Final = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed: the batch was cancelled.",
    "failed": "This request was not executed: the batch could not go on.",
}

Begin = Callable[[Arrival], Awaitable[tuple[Started, WholeAnswer]]]
"""An endpoint: starts the request of a line."""


class Keys(Protocol):
    """What the runner asks of authentication."""

    async def find(self, org: str, key_id: str) -> ApiKey:
        """Return a key as it is now. Raises InvalidApiKey, DependencyDown."""
        ...

    def new_rid(self) -> str:
        """Return the id of a request that arrives now."""
        ...

    def arrive(self, key: ApiKey, body: bytes, endpoint: str, *, rid: str, repeated: bool) -> Arrival:
        """Return a line as a request that has arrived."""
        ...


Settled = Callable[[str, str], Awaitable[bool | None]]
"""Whether a request (organisation, rid) was paid; None: it has not been settled yet. Raises DependencyDown."""


class BatchRunner:
    """See the module's docstring. `run` until cancelled, then `release`."""

    def __init__(
        self,
        engine: AsyncEngine,
        batches: Batches,
        files: Files,
        keys: Keys,
        endpoints: Mapping[str, Begin],
        was_paid: Settled,
        *,
        max_lines_at_once: int,
        max_line_bytes: int,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._files = files
        self._keys = keys
        self._endpoints = endpoints
        self._was_paid = was_paid
        self._max_line_bytes = max_line_bytes
        self._lines_at_once = max_lines_at_once
        self._wake = asyncio.Event()
        self._num_batches = 0
        self._runs: dict[str, _Run] = {}

    def wake(self) -> None:
        """Look for batches now: one was created here."""
        self._wake.set()

    def cancelled(self, batch_id: str) -> None:
        """Take notice that a batch was cancelled here; one that another gateway runs is looked at within LOOK_S."""
        if batch_id in self._runs:
            self._runs[batch_id].look()

    async def run(self) -> None:
        """Claim and run batches."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                try:
                    while self._num_batches < MAX_BATCHES:
                        claimed = await self._batches.claim_across_tenants(LEASE)
                        if claimed is None:
                            break
                        self._num_batches += 1
                        tasks.create_task(self._serve(claimed))
                except DATABASE_ERRORS as error:
                    log.warning("batches_unavailable", error=str(error))
                await _pause(self._wake, CLAIM_S)

    async def release(self) -> None:
        """Give back what is not done. Only after `run` has ended."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._batches.release_across_tenants()
        except DATABASE_ERRORS as error:
            log.warning("batches_not_released", error=str(error))

    async def _serve(self, batch: Batch) -> None:
        try:
            run = _Run(self, self._batches, batch, self._keys, self._endpoints[batch.endpoint], self._was_paid)
            self._runs[batch.id] = run
            await run.run(self._lines_at_once)
        except* RunnerReplaced:
            log.info("batch_taken_over", batch=batch.id)
        except* DATABASE_ERRORS as errors:  # claimed again when the lease is over
            log.warning("batch_interrupted", batch=batch.id, error=str(errors.exceptions))
        except* Exception:
            log.exception("batch_failed", batch=batch.id)
        finally:
            self._num_batches -= 1
            self._runs.pop(batch.id, None)
            self._wake.set()  # there is room for another

    # -- what a run needs ------------------------------------------------------------------------------------

    async def validate(self, batch: Batch) -> Batch | None:
        """Check all lines, then write them; None: the batch was rejected."""
        checker = LineChecker(batch.endpoint, max_line_bytes=self._max_line_bytes)
        try:
            async for _ in self._checked(batch, checker):
                pass
        except ServingError as error:
            checker.errors.append(LineError(code=error.code, message=error.message, param="input_file_id"))
        checker.ended()
        if checker.errors:
            await self._batches.reject(batch.organisation_id, batch.id, checker.errors)
            return None
        again = LineChecker(batch.endpoint, max_line_bytes=self._max_line_bytes)
        return await self._batches.accept(batch.organisation_id, batch.id, self._checked(batch, again))

    async def _checked(self, batch: Batch, checker: LineChecker) -> AsyncIterator[Line]:
        pieces = self._files.read(batch.organisation_id, batch.input_file_id)
        async for number, raw in lines_of(pieces, max_line_bytes=self._max_line_bytes):
            line = checker.check(number, raw)
            if line is not None:
                yield line

    async def finalize(self, batch: Batch, *, error: LineError | None = None) -> None:
        """Write the files and end the batch: with `error` if it could not go on, else as far as it came."""
        batch = await self._batches.finalizing(batch.organisation_id, batch.id)
        if error is not None:
            status = "failed"
        elif batch.status == "cancelling":
            status = "cancelled"
        else:
            status = "completed" if batch.completed + batch.failed == batch.total else "expired"
        async with self._engine.begin() as db:
            output = await self._file(db, batch, ok=True, status=status) if batch.completed else None
            errors = await self._file(db, batch, ok=False, status=status) if batch.completed < batch.total else None
            await self._batches.end(db, batch, status=status, output_file_id=output, error_file_id=errors, error=error)
        log.info("batch_ended", batch=batch.id, status=status, total=batch.total, completed=batch.completed)

    async def _file(self, db: AsyncConnection, batch: Batch, *, ok: bool, status: str) -> str:
        stored = await self._files.write(
            db,
            batch.organisation_id,
            batch.project_id,
            self._lines(db, batch, ok=ok, status=status),
            purpose="batch_output",
            filename=f"{batch.id}_{'output' if ok else 'error'}.jsonl",
        )
        return stored.id

    async def _lines(self, db: AsyncConnection, batch: Batch, *, ok: bool, status: str) -> AsyncIterator[bytes]:
        last = 0
        while rows := await self._batches.read_lines(db, batch.id, after=last, limit=_READ_ROWS):
            for row in rows:
                last = row.line
                if (row.state == "done") is ok:
                    yield _written(batch, row, status)


class _Run:
    """One batch in one gateway."""

    def __init__(
        self, runner: BatchRunner, batches: Batches, batch: Batch, keys: Keys, begin: Begin, was_paid: Settled
    ) -> None:
        self._runner = runner
        self._batches = batches
        self._batch = batch
        self._keys = keys
        self._begin = begin
        self._was_paid = was_paid
        self._look = asyncio.Event()
        self._stop = asyncio.Event()  # cancelled, expired, or the key is good no longer
        self._error: LineError | None = None
        self._running: list[Started] = []

    async def run(self, lines_at_once: int) -> None:
        """Bring the batch to its end. Raises RunnerReplaced or one of DATABASE_ERRORS, in a group."""
        async with asyncio.TaskGroup() as tasks:
            holding = tasks.create_task(self._hold())
            try:
                await self._bring_to_end(lines_at_once)
            finally:
                holding.cancel()

    async def _bring_to_end(self, lines_at_once: int) -> None:
        batch = self._batch
        if batch.in_progress_at is None and batch.status == "validating":
            validated = await self._runner.validate(batch)
            if validated is None:
                return
            batch = validated
        if batch.status == "in_progress":
            await self._run_lines(lines_at_once)
        await self._runner.finalize(batch, error=self._error)

    async def _hold(self) -> None:
        """Keep the claim, and see whether the batch is cancelled or over."""
        held_s = time.monotonic()
        while True:
            try:
                batch = await self._batches.extend(self._batch.organisation_id, self._batch.id, LEASE)
                held_s = time.monotonic()
                if batch.status == "cancelling":
                    self._stop_lines()
                elif batch.expires_at <= dt.datetime.now(dt.UTC):
                    self._stop_lines(expired=True)
            except DATABASE_ERRORS:
                if time.monotonic() - held_s > LEASE.total_seconds():
                    raise
            await _pause(self._look, LOOK_S)
            self._look.clear()

    def look(self) -> None:
        """Look at the batch now."""
        self._look.set()

    def _stop_lines(self, *, expired: bool = False) -> None:
        self._stop.set()
        for started in tuple(self._running):
            if expired:  # a day was not enough, which is nobody's fault but ours
                started.break_off("batch_expired")
            else:
                started.client_left()

    async def _run_lines(self, lines_at_once: int) -> None:
        slots = asyncio.Semaphore(lines_at_once)
        async with asyncio.TaskGroup() as tasks:
            while not self._stop.is_set():
                await slots.acquire()
                rid = self._keys.new_rid()
                row = await self._batches.take_line(self._batch.organisation_id, self._batch.id, rid)
                if row is None:
                    return
                running = tasks.create_task(self._run_line(row, ran_before=row.rid != rid))
                running.add_done_callback(lambda _: slots.release())

    async def _run_line(self, row: LineRow, *, ran_before: bool) -> None:
        failures = waits = 0
        rid, paid = row.rid, False
        begun = ran_before
        while not self._stop.is_set():
            try:
                if ran_before:
                    paid = await self._paid_before(row)
                    ran_before = False
                if begun:
                    rid = await self._again(row, paid=paid)
                begun = True
                key = await self._keys.find(self._batch.organisation_id, self._batch.key_id)
                arrival = self._keys.arrive(key, row.body, self._batch.endpoint, rid=rid, repeated=paid)
                body = await self._answer(arrival)
            except InvalidApiKey as error:
                self._error = LineError(code=error.code, message=error.message)
                self._stop_lines()
                return
            except ServingError as error:
                again = error.http_status in _AGAIN and error.should_retry is not False
                failures += error.http_status in _COUNTED
                if again and failures < MAX_FAILURES:
                    waits += 1
                    await _pause(self._stop, _wait_s(error, waits))
                    continue
                await self._finish(
                    row, rid, http_status=error.http_status, body=msgspec.json.encode(openai_body(error))
                )
                return
            if body is not None:
                await self._finish(row, rid, http_status=200, body=body)
            return

    async def _paid_before(self, row: LineRow) -> bool:
        """Return whether the run in a gateway that died was paid. Raises NoCapacity: not known yet."""
        paid = await self._was_paid(self._batch.organisation_id, row.rid)
        if paid is None:
            raise NoCapacity("The line's run in another gateway has not been settled.", retry_after_s=_SETTLED_S)
        return paid

    async def _again(self, row: LineRow, *, paid: bool) -> str:
        """Return the id of one more run of a line. One that was paid keeps the paid id: that is what counts."""
        rid = self._keys.new_rid()
        if not paid:
            await self._batches.rename_line(self._batch.organisation_id, self._batch.id, row.line, rid)
        return rid

    async def _answer(self, arrival: Arrival) -> bytes | None:
        """Return the answer to a line; None: it was stopped. Raises one of contracts.errors."""
        started, output = await self._begin(arrival)
        self._running.append(started)
        try:
            if self._stop.is_set():
                started.client_left()
            await output.ended()
        finally:
            self._running.remove(started)
            started.client_left()
        if output.refusal is not None:
            raise output.refusal
        return None if output.event is None else output.body(output.event)

    async def _finish(self, row: LineRow, rid: str, *, http_status: int, body: bytes) -> None:
        await self._batches.finish_line(
            self._batch.organisation_id,
            self._batch.id,
            row.line,
            ok=http_status == 200,
            rid=rid,
            http_status=http_status,
            answer=body,
        )


def _written(batch: Batch, row: LineRow, status: str) -> bytes:
    """Return a line as it stands in the output or error file."""
    if row.answer is not None:
        return output_line(
            batch_id=batch.id,
            line=row.line,
            custom_id=row.custom_id,
            rid=row.rid,
            http_status=row.http_status,
            body=row.answer,
        )
    return unanswered_line(
        batch_id=batch.id, line=row.line, custom_id=row.custom_id, code=f"batch_{status}", message=_UNANSWERED[status]
    )


def _wait_s(error: ServingError, waits: int) -> float:
    wait_s = error.retry_after_s or min(_LONGEST_WAIT_S, 0.25 * 2.0**waits)
    return min(_LONGEST_WAIT_S, wait_s) * random.uniform(0.75, 1.25)  # noqa: S311 - spreads retries


async def _pause(wake: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await wake.wait()
    except TimeoutError:
        pass
