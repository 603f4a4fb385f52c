"""The decision log of one pool: what was seen and decided, as JSON lines, rotated (policy.decisions has the records).

1. A term begins its own file; what is there is rotated away: NAME.jsonl -> NAME.1.jsonl -> ... -> NAME.<keep>.jsonl.
2. Lines are collected and written with each tick, so that no decision waits for the disk.
3. A file that is full is rotated, and the next begins with the head and the workers again.
4. A disk that fails ends the log, with one warning: a decision never waits for its record.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import structlog

from contracts.wire import RequestOutcome
from scheduler.book import Request
from scheduler.policy.blame import Stage
from scheduler.policy.decisions import (
    Arrived,
    Ended,
    Head,
    Placed,
    Record,
    Refused,
    RungChanged,
    Scaled,
    Ticked,
    WorkerSeen,
    encode,
)
from scheduler.policy.headcount import ScalePlan
from scheduler.policy.ladder import Step
from scheduler.policy.ratio import Decision
from scheduler.policy.sight import RatioState, Sight
from scheduler.worker import Worker

log = structlog.get_logger()

MakeHead = Callable[[int], Head]
"""Unix ms of the file's zero -> its first record."""


class DecisionLog:
    """Writes a pool's records; with no folder it takes them and forgets them."""

    def __init__(
        self,
        folder: Path | None,
        pool: str,
        *,
        max_bytes: int = 64 * 1024 * 1024,
        keep: int = 8,
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._max_bytes = max_bytes
        self._keep = keep
        self._now_unix_ms = now_unix_ms
        self._zero_ms = 0
        self._lines: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._num_bytes = 0
        self._head: MakeHead | None = None
        self._workers: dict[str, WorkerSeen] = {}

    @property
    def on(self) -> bool:
        """Whether records go anywhere."""
        return self._head is not None

    def begin(self, head: MakeHead, workers: Sequence[Worker]) -> None:
        """Start the file of a term."""
        if self._folder is None:
            return
        self._head = head
        self._workers = {}
        self._zero_ms = self._now_unix_ms()
        for worker in workers:
            self._workers[worker.worker_id] = self._seen(worker)
        self._open()

    def end(self) -> None:
        """Write what is left and close."""
        self.flush()
        if self._file is not None:
            self._file.close()
        self._file, self._head = None, None

    def flush(self) -> None:
        """Write the lines collected since the last time."""
        if not self._lines or self._file is None:
            return
        lines, self._lines = b"".join(self._lines), []
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            self._fail(error)
            return
        self._num_bytes += len(lines)
        if self._num_bytes > self._max_bytes:
            self._file.close()
            self._zero_ms = self._now_unix_ms()
            self._open()

    # -- records -----------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Write that a request entered the inbox."""
        if self._head is not None:
            submit = request.submit
            self._add(
                Arrived(
                    at_ms=self._at_ms(),
                    rid=submit.rid,
                    tier=request.tier,
                    tenant=submit.owner.org,
                    prompt_tokens=request.prompt_tokens,
                    max_tokens=submit.sampling.max_tokens,
                    session=submit.session,
                    blocks=request.blocks,
                    target=submit.owner.slo,
                )
            )

    def placed(self, request: Request) -> None:
        """Write where an attempt runs, and what was predicted for it."""
        if self._head is not None and request.path is not None and request.decode_ref is not None:
            self._add(
                Placed(
                    at_ms=self._at_ms(),
                    rid=request.rid,
                    attempt=request.attempt,
                    path=request.path,
                    decode=request.decode_ref.worker_id,
                    prefill=request.prefill_ref.worker_id if request.prefill_ref is not None else None,
                    reason=request.reason.value if request.reason is not None else "",
                    waited_ms=max(0.0, request.placed_ms - request.arrived_ms),
                    cached_tokens=request.hoped_cached_tokens,
                    predicted_ttft_ms=request.predicted_ttft_ms,
                    predicted_step_ms=request.predicted_step_ms,
                )
            )

    def refused(self, request: Request, reason: str, retry_after_s: float | None) -> None:
        """Write that a request was sent away."""
        if self._head is not None:
            self._add(Refused(at_ms=self._at_ms(), rid=request.rid, reason=reason, retry_after_s=retry_after_s))

    def ended(self, request: Request, outcome: RequestOutcome, stage: Stage) -> None:
        """Write how a request ended."""
        if self._head is not None:
            timings = outcome.timings
            self._add(
                Ended(
                    at_ms=self._at_ms(),
                    rid=request.rid,
                    prompt_tokens=outcome.prompt_tokens,
                    cached_tokens=outcome.cached_tokens,
                    output_tokens=outcome.completion_tokens,
                    ttft_ms=timings.ttft_ms if timings is not None else None,
                    tpot_ms=timings.tpot_ms if timings is not None else None,
                    met=bool(outcome.slo_met),
                    blamed=stage,
                )
            )

    def ticked(self, decision: Decision, state: RatioState, sight: Sight) -> None:
        """Write a tick of the ratio controller."""
        if self._head is not None:
            self._add(Ticked.of(self._at_ms(), decision, state, sight))

    def scaled(self, plan: ScalePlan, mode: str, *, changed: bool) -> None:
        """Write what the autoscaler decided, if it took a step or `changed` its reason."""
        if self._head is not None and (plan.steps or changed):
            self._add(Scaled.of(self._at_ms(), plan, mode))

    def climbed(self, step: Step) -> None:
        """Write that the degrade ladder moved."""
        if self._head is not None:
            self._add(
                RungChanged(at_ms=self._at_ms(), before=step.before.label, after=step.after.label, why=step.why.value)
            )

    def workers(self, workers: Sequence[Worker]) -> None:
        """Write what changed among the workers since the last time."""
        if self._head is None:
            return
        for worker in workers:
            seen, before = self._seen(worker), self._workers.get(worker.worker_id)
            if before is None or (before.epoch, before.role, before.state) != (seen.epoch, seen.role, seen.state):
                self._workers[worker.worker_id] = seen
                self._add(seen)

    # -- inside ------------------------------------------------------------------------------------

    def _seen(self, worker: Worker) -> WorkerSeen:
        return WorkerSeen(
            at_ms=self._at_ms(),
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            role=worker.role,
            state=worker.condition,
            zone=worker.registration.zone,
        )

    def _at_ms(self) -> float:
        return float(self._now_unix_ms() - self._zero_ms)

    def _add(self, record: Record) -> None:
        self._lines.append(encode(record))

    def _open(self) -> None:
        assert self._folder is not None
        assert self._head is not None
        current = self._folder / f"{self._pool}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for number in range(self._keep - 1, 0, -1):
                older = self._folder / f"{self._pool}.{number}.jsonl"
                if older.exists():
                    older.replace(self._folder / f"{self._pool}.{number + 1}.jsonl")
            if current.exists():
                current.replace(self._folder / f"{self._pool}.1.jsonl")
            self._file = current.open("wb")
        except OSError as error:
            self._fail(error)
            return
        self._num_bytes = 0
        first: list[bytes] = [encode(self._head(self._zero_ms))]
        first += [encode(seen) for seen in self._workers.values()]
        self._lines = first + self._lines

    def _fail(self, error: OSError) -> None:
        log.warning("decision_log_failed", pool=self._pool, folder=str(self._folder), error=str(error))
        self._lines = []
        self._file, self._head = None, None
