"""Engine requests of the worker itself: they show that something works and reach no gateway, no record, no bill.

A *probe* is one side of a tiny hand-off that the scheduler sends through two workers before it pairs them. A
*trial* without a peer follows a change of role; the first prompts of a worker are such trials, too.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, Phase, Role
from contracts.parsing import Detail
from contracts.v1 import worker_pb2 as pb
from contracts.wire import PHASE_TO_PB, Attempt, Counts, Sampling, Stages, attempt_to_pb, pack_ids
from workers.engine import End, Engine, Job, Refusal

log = structlog.get_logger()

MAX_PROBES = 256
PHASE_OF: Final = {Role.PREFILL: Phase.PREFILL, Role.DECODE: Phase.DECODE, Role.UNIFIED: Phase.UNIFIED}


def lone_job(role: Role, prompt: Sequence[int], *, max_tokens: int, within_s: float) -> Job:
    """Return a job of the worker itself in one of the roles, without a peer."""
    now_unix_ms = int(time.time() * 1000)
    return Job(
        attempt=Attempt(new_rid(now_unix_ms), 1),
        phase=PHASE_OF[role],
        gateway_id="",
        deadline_unix_ms=now_unix_ms + int(within_s * 1000),
        prompt=pack_ids(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


class Trial:
    """One such request; the engine's Outlet."""

    def __init__(self, job: Job, on_end: Callable[["Trial"], None] | None = None) -> None:
        self.job = job
        self.num_tokens = 0
        self.result: End | None = None
        self.accepted_s = time.monotonic()
        self._on_end = on_end
        self._ended = asyncio.Event()

    def chunk(self, text: str, token_ids: Sequence[int], detail: Detail | None = None) -> None:
        """Count the tokens; their text is nobody's."""
        del text, detail
        self.num_tokens += len(token_ids)

    def prefilled(self, counts: Counts, stages: Stages) -> None:
        """Nothing: the end says it all."""

    def end(self, end: End) -> None:
        """Keep the end."""
        self.result = end
        self._ended.set()
        if self._on_end is not None:
            self._on_end(self)

    @property
    def error(self) -> str:
        """Empty when it went well."""
        if self.result is None:
            return "no end within its time"
        if self.result.reason.complete:
            return ""
        return self.result.error or self.result.reason.value

    async def run(self, engine: Engine, *, within_s: float) -> str:
        """Submit, wait for the end, and return "" or what went wrong."""
        try:
            engine.submit(self.job, self)
        except Refusal as refusal:
            return refusal.message
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            engine.abort(self.job)
        return self.error


class Probes:
    """The probes that run on this worker."""

    def __init__(self, engine: Engine, report: Callable[[pb.ProbeResult], None]) -> None:
        self._engine = engine
        self._report = report
        self._running: dict[str, Trial] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, job: Job) -> None:
        """Start one side of a probe; its result is reported. Raises Refusal."""
        if job.engine_id in self._running:
            return
        if len(self._running) >= MAX_PROBES:
            raise Refusal("full", "too many probes run here")
        trial = Trial(job, self._ended)
        self._running[job.engine_id] = trial
        try:
            self._engine.submit(job, trial)
        except BaseException:
            self._running.pop(job.engine_id, None)
            raise

    def tick(self) -> None:
        """End those whose time is up; repeated, as every abort, until the engine has followed."""
        now_ms = time.time() * 1000
        for trial in tuple(self._running.values()):
            if trial.job.deadline_unix_ms <= now_ms:
                self._engine.abort(trial.job)

    def end_all(self) -> None:
        """End them all: the worker drains or stops."""
        for trial in tuple(self._running.values()):
            self._engine.abort(trial.job)

    def _ended(self, trial: Trial) -> None:
        self._running.pop(trial.job.engine_id, None)
        end = trial.result
        assert end is not None
        late = end.reason is FinishReason.ABORTED and trial.job.deadline_unix_ms <= time.time() * 1000
        self._report(
            pb.ProbeResult(
                id=attempt_to_pb(trial.job.attempt),
                phase=PHASE_TO_PB[trial.job.phase],
                ok=not trial.error,
                ms=(time.monotonic() - trial.accepted_s) * 1000,
                error="deadline" if late else trial.error,
            )
        )
