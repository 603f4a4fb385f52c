"""What the pool's workers cost: stated by the catalogue, else by the workers, else learned from nothing.

Whatever the start, measurements correct it (policy.fit). They come from two places: each PrefillDone has the
computing time of its prompt; between two Status of a worker that only decodes, tokens over time gives the step, if it
made some all the time: a request that ran at the first of them is still there at the second.
"""

import msgspec

from contracts.lifecycle import Role
from contracts.perf import DEFAULT_LATENCY, LatencyModel
from contracts.v1 import worker_pb2 as pb
from scheduler.policy.fit import FitState, LatencyFit
from scheduler.profile import PoolProfile
from scheduler.worker import ChargeKey, Worker

_LONGEST_GAP_MS = 5_000
_STEPS_MEASURED = 8
_KNOWN_AFTER = 20


class _Reading(msgspec.Struct, frozen=True):
    """Of one Status."""

    epoch: int
    at_unix_ms: int
    tokens: int
    chunks: int
    num_running: int
    kv_tokens: int
    charged: frozenset[ChargeKey]

    def went_on(self, until: "_Reading") -> bool:
        """Whether one of the requests that ran is still there: no pause is in between."""
        not_running = max(0, len(self.charged) - self.num_running)
        return len(self.charged & until.charged) > not_running


class Costs:
    """One pool's latency model. Lives as long as the process: a new term need not learn anew."""

    def __init__(self, profile: PoolProfile) -> None:
        self._stated = profile.latency
        self._fit = LatencyFit(profile.latency or DEFAULT_LATENCY, stated=profile.latency is not None)
        self._readings: dict[str, _Reading] = {}

    def latency(self) -> LatencyModel:
        """Return the costs as believed at the moment."""
        return self._fit.model

    @property
    def state(self) -> FitState:
        """What was learned, for the next leader."""
        return self._fit.state

    def restore(self, state: FitState) -> None:
        """Take over what a former leader learned: a standby sees no prompts computed."""
        self._fit.restore(state)

    def known(self) -> bool:
        """Whether predictions rest on something: a statement, or enough measurements of both phases."""
        return self._fit.stated or min(self._fit.num_seen) >= _KNOWN_AFTER

    @property
    def num_seen(self) -> tuple[int, int]:
        """Measurements of prompts, of decode steps."""
        return self._fit.num_seen

    def registered(self, worker: Worker) -> None:
        """Take what a worker says of itself, unless the operator stated it."""
        own = worker.registration.latency
        if own is not None and self._stated is None and not self._fit.stated:
            self._fit = LatencyFit(own, stated=True)

    def prompt_computed(self, message: pb.PrefillDone) -> None:
        """Take the computing time of a prompt."""
        counts = message.counts
        if counts.prompt_tokens:
            self._fit.prompt(
                uncached_tokens=counts.prompt_tokens - counts.cached_tokens,
                cached_tokens=counts.cached_tokens,
                compute_ms=message.stages.compute_ms,
            )

    def status(self, worker: Worker, status: pb.Status) -> None:
        """Take a worker's progress since its last Status."""
        if worker.role is Role.PREFILL:
            return
        now = _Reading(
            epoch=worker.epoch,
            at_unix_ms=status.sent_unix_ms,
            tokens=status.tokens_produced,
            chunks=status.prefill_chunks_done,
            num_running=status.num_running,
            kv_tokens=status.kv_used_tokens,
            charged=frozenset(worker.charges),
        )
        before = self._readings.setdefault(worker.worker_id, now)
        elapsed_ms = now.at_unix_ms - before.at_unix_ms
        steady = before.num_running == now.num_running > 0 and before.chunks == now.chunks
        went_on = before.went_on(now)
        if before.epoch != now.epoch or not steady or not went_on or not 0 <= elapsed_ms <= _LONGEST_GAP_MS:
            self._readings[worker.worker_id] = now
            return
        made = now.tokens - before.tokens
        if made < _STEPS_MEASURED * now.num_running:
            return  # too few steps to tell: the span grows
        self._readings[worker.worker_id] = now
        self._fit.step(
            num_requests=now.num_running,
            kv_tokens=(before.kv_tokens + now.kv_tokens) / 2,
            step_ms=elapsed_ms * now.num_running / made,
        )

    def forget(self, worker_id: str) -> None:
        """Drop what is kept of a worker that is gone."""
        self._readings.pop(worker_id, None)
