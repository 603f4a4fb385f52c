"""What users got, and whose fault it was when they did not get what they were promised.

An outcome comes from the gateway that served the request; the stages come from the workers that ran it and from
the queue here. Joined, they name one stage per miss. Outcomes are best effort and deduplicated by the book: a
request is counted when it is forgotten.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from contracts.lifecycle import Phase, Role
from contracts.perf import LatencyModel
from contracts.usage import Outcome
from contracts.wire import RequestOutcome, Stages
from observability.metrics import Instruments
from scheduler.book import Request
from scheduler.policy.blame import Blamed, BlameWindow, Stage, Stamps, blame
from scheduler.policy.foresight import Outcomes
from scheduler.policy.turns import BATCH_TIER


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes since the last reading."""

    met: int = 0
    missed: int = 0
    structural: int = 0
    refused: int = 0
    by_stage: Mapping[str, int] = {}


class SloWindow:
    """Outcomes of one pool during one term."""

    def __init__(
        self,
        pool: str,
        *,
        latency: Callable[[], LatencyModel],
        instruments: Instruments,
        span_s: float = 60.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._latency = latency
        self._instruments = instruments
        self._now_s = now_s
        self._window = BlameWindow(span_s=span_s)
        self._since: Counter[Stage | None] = Counter()
        self._outcomes = Outcomes()

    def ended(self, request: Request, outcome: RequestOutcome) -> Stage:
        """Take what became of a request that ran, and return the stage its miss is blamed on.

        A client that left before the end says nothing about the targets.
        """
        stage = self._judge(request, outcome)
        if outcome.slo_met is None:
            return stage
        self._instruments.slo.add(
            1,
            {
                "met": "true" if stage is Stage.NONE else "false",
                "phase_blamed": stage.value,
                "tier": outcome.tier,
                "model": outcome.model,
            },
        )
        if request.tier != BATCH_TIER:
            self._window.add(self._now_s(), stage)
            self._since[stage] += 1
            self._outcomes = self._outcomes.and_one(stage)
        return stage

    def refused(self, request: Request) -> None:
        """Count a request that was sent away for lack of capacity."""
        if request.tier != BATCH_TIER:
            self._window.refuse(self._now_s())
            self._since[None] += 1
            self._outcomes = self._outcomes.and_one(None)

    def blamed(self) -> Blamed:
        """Return the counts of the last minute."""
        return self._window.blamed(self._now_s())

    def take_span(self) -> Span:
        """Return the counts since the last call."""
        since, self._since = self._since, Counter()
        missed = {s: n for s, n in since.items() if s not in (None, Stage.NONE, Stage.STRUCTURAL)}
        return Span(
            met=since[Stage.NONE],
            missed=sum(missed.values()),
            structural=since[Stage.STRUCTURAL],
            refused=since[None],
            by_stage={stage.value: n for stage, n in missed.items() if stage is not None},
        )

    def take_outcomes(self) -> Outcomes:
        """Return what became of requests since the last call: for the number of workers."""
        outcomes, self._outcomes = self._outcomes, Outcomes()
        return outcomes

    def _judge(self, request: Request, outcome: RequestOutcome) -> Stage:
        if outcome.slo_met or outcome.slo_met is None:
            return Stage.NONE
        if outcome.outcome != Outcome.FINISHED or outcome.timings is None:
            return Stage.LOST
        stage = blame(self._stamps(request, outcome))
        # The gateway judged by its own clock: where ours sees no excess, what is left is the gateway's.
        return Stage.GATEWAY if stage is Stage.NONE else stage

    def _stamps(self, request: Request, outcome: RequestOutcome) -> Stamps:
        timings = outcome.timings
        assert timings is not None
        latency, prompt = self._latency(), request.prompt_tokens
        prefill = next((part.stages for part in request.side(Phase.PREFILL)), None)
        stream = next((part.stages for part in request.streaming_parts), Stages())
        decode_wait_ms = request.blocked_ms.get(Role.DECODE, 0.0)
        prefill_wait_ms = sum(ms for role, ms in request.blocked_ms.items() if role is not Role.DECODE)
        if prefill is not None:
            decode_wait_ms += stream.queue_ms
            prefill_wait_ms += max(0.0, prefill.queue_ms - stream.queue_ms)  # it waits for decode's room, too
            prefill_ms = prefill.compute_ms
        else:
            prefill_wait_ms += stream.queue_ms
            prefill_ms = max(0.0, stream.first_token_ms - stream.queue_ms)
        known_ms = decode_wait_ms + prefill_wait_ms + prefill_ms + timings.transfer_ms
        step_ms = request.predicted_step_ms or latency.decode.step_ms(1, prompt)
        return Stamps(
            target=request.submit.owner.slo,
            ttft_ms=timings.ttft_ms,
            tpot_ms=timings.tpot_ms,
            itl_p99_ms=timings.itl_p99_ms,
            decode_ms=timings.decode_ms,
            decode_tokens=timings.decode_tokens,
            gateway_ms=max(0.0, timings.ttft_ms - known_ms),
            prefill_wait_ms=prefill_wait_ms,
            decode_wait_ms=decode_wait_ms,
            prefill_ms=prefill_ms,
            transfer_ms=timings.transfer_ms,
            expected_prefill_ms=latency.prefill.ms(max(1, prompt - outcome.cached_tokens), outcome.cached_tokens),
            expected_transfer_ms=latency.transfer.ms(prompt) if prefill is not None else 0.0,
            idle_step_ms=latency.decode.step_ms(1, prompt),
            mixed_share=max(0.0, 1 - step_ms / timings.tpot_ms) if prefill is None and timings.tpot_ms > 0 else 0.0,
        )
