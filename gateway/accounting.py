"""From what the workers and the scheduler said to the one usage event of a request. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from contracts.lifecycle import FinishReason, HandOff, Path, Phase
from contracts.rating import Tokens
from contracts.settlement import usage_event_of
from contracts.slo import SloTarget, Timings, met
from contracts.usage import EMPTY_ANSWER, Outcome, UsageEvent
from contracts.wire import Placed
from gateway.slots import Slot
from gateway.terms import Closed, Ending, Terms

Slots = Mapping[int, Slot]

BUDGET_USED_UP: Final = "budget"
"""Cause of a finished request whose answer no budget paid further."""


def usage_event(
    terms: Terms,
    ending: Ending,
    *,
    attempt: int,
    accepted: bool,
    placed: Placed | None,
    streams: Slots,
    prefills: Slots,
    prompts: Sequence[Slot],
    num_before: int,
    timings: Timings | None,
) -> UsageEvent:
    """Return the event of a request that ended.

    Args:
        terms: what was agreed at admission.
        ending: how it ended.
        attempt: the current one, 0 = never placed.
        accepted: whether a token of it reached the gateway.
        placed: the notice about this attempt, if it came.
        streams: decode or unified slots by sample, those that earlier attempts finished included.
        prefills: prefill slots of the current attempt by sample.
        prompts: slots that may know the prompt's meters, those of the first attempt first.
        num_before: tokens that lost attempts delivered.
        timings: what the client saw.
    """
    owner, outcome = terms.owner, ending.outcome
    tokens, reasoning_tokens, estimated = count(
        streams,
        prompts,
        accepted=accepted,
        attempt=attempt,
        prompt_tokens=terms.prompt_tokens,
        num_samples=terms.num_samples,
        num_before=num_before,
    )
    slo_met: bool | None = None
    if outcome is Outcome.FINISHED:
        slo_met = met(timings, owner.slo) if timings is not None else None
    elif outcome is Outcome.INTERRUPTED:
        slo_met = False
    cause = ending.cause
    if terms.prompt_only:
        slo_met = None  # nobody waits for it
    elif outcome is Outcome.FINISHED and not cause and not any(slot.said for slot in streams.values()):
        cause = EMPTY_ANSWER
    first = streams.get(0)
    path, hand_off = _path(placed, first)
    return usage_event_of(
        owner,
        rid=terms.rid,
        pool=terms.pool,
        outcome=outcome,
        cause=cause,
        finish_reason=_finish_reason(first, cause),
        tokens=tokens,
        reasoning_tokens=reasoning_tokens,
        path=path,
        hand_off=hand_off,
        attempts=max(1, attempt),
        stream=terms.stream,
        batch=terms.batch,
        prefill_worker=_worker(prefills, placed.prefill.worker_id if placed and placed.prefill else ""),
        decode_worker=_worker(streams, placed.decode.worker_id if placed else ""),
        timings=timings,
        slo_met=slo_met,
        estimated=estimated,
    )


def never_ran(terms: Terms) -> Closed:
    """Return the end of a request that was given up between its reservation and the inbox."""
    event = usage_event_of(
        terms.owner,
        rid=terms.rid,
        pool=terms.pool,
        outcome=Outcome.REFUSED,
        cause="not_admitted",
        stream=terms.stream,
        batch=terms.batch,
    )
    return Closed(event=event, entry_id="", ended_unix_ms=terms.arrived_unix_ms)


def count(
    streams: Slots,
    prompts: Sequence[Slot],
    *,
    accepted: bool,
    attempt: int,
    prompt_tokens: int,
    num_samples: int,
    num_before: int,
) -> tuple[Tokens, int, bool]:
    """Return the meters, the reasoning tokens in them, and whether any number is unconfirmed.

    Prompt meters come from sample 0 of the first attempt that finished its prefill: what a continuation
    computes again is our cost. Decode is the sum over samples and attempts.
    """
    decode, reasoning = num_before, 0
    estimated = num_before > 0 and len(streams) < num_samples
    for slot in streams.values():
        if slot.reason is None:
            estimated = True
            decode += slot.num_tokens
        else:
            decode += slot.counts.completion_tokens
            reasoning += slot.counts.reasoning_tokens
            estimated |= slot.counts.estimated
    told = [slot for slot in prompts if slot.phase is not Phase.DECODE and slot.reason is not None]
    source = next((slot for slot in told if slot.counts.prompt_tokens), None)
    first = streams.get(0)
    if source is not None:  # a continuation computes the answer so far with the prompt
        prompt, cached = min(source.counts.prompt_tokens, prompt_tokens), source.counts.cached_tokens
        estimated |= source is not prompts[0]
    elif told and not accepted:
        prompt = cached = 0
    elif first is not None and first.counts.prompt_tokens:
        prompt, cached, estimated = min(first.counts.prompt_tokens, prompt_tokens), first.counts.cached_tokens, True
    else:  # tokens prove that the prompt was computed; without them nobody confirmed any work
        prompt, cached = prompt_tokens if accepted else 0, 0
        estimated = attempt > 0
    cached = min(cached, prompt)
    return Tokens(prefill_computed=prompt - cached, prefill_cached=cached, decode=decode), reasoning, estimated


def timings_of(
    terms: Terms,
    *,
    streams: Slots,
    prompts: Sequence[Slot],
    num_tokens: int,
    first_sent_s: float | None,
    queue_ms: float,
    now_s: float,
) -> Timings:
    """Return what the client saw of a request with at least one token. Times are of the loop's clock."""
    first_s = now_s if first_sent_s is None else first_sent_s  # None: the only chunk leaves with the end
    stream, prompt = streams.get(0), prompts[0] if prompts else None
    prefill_ms = 0.0
    if prompt is not None and prompt.phase is Phase.PREFILL:
        prefill_ms = prompt.stages.queue_ms + prompt.stages.compute_ms
    elif prompt is not None:
        prefill_ms = prompt.stages.first_token_ms
    return Timings(
        ttft_ms=(first_s - terms.arrived_s) * 1000,
        decode_ms=(now_s - first_s) * 1000,
        decode_tokens=max(num_tokens, sum(slot.counts.completion_tokens for slot in streams.values())),
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        transfer_ms=_transfer_ms(stream, prompt),
        total_ms=(now_s - terms.arrived_s) * 1000,
        itl_p99_ms=_slowest_gap_ms(streams),
    )


def _transfer_ms(stream: Slot | None, prompt: Slot | None) -> float:
    """Return the hand-off as the decode side saw it; as the prefill side did where the decode side cannot tell."""
    seen_ms = stream.stages.transfer_ms if stream is not None else 0.0
    return seen_ms or (prompt.stages.transfer_ms if prompt is not None and prompt.phase is Phase.PREFILL else 0.0)


def _slowest_gap_ms(streams: Slots) -> float | None:
    """Return the 99th percentile of gaps of the sample with the largest; None when they were not measured."""
    gaps = [slot.delivered.gaps for slot in streams.values() if slot.delivered.gaps is not None]
    return max((ms for ms in (one.p99_ms() for one in gaps) if ms is not None), default=None)


def blamed(event: UsageEvent, target: SloTarget) -> str:
    """Return the stage to blame for a missed target: a label of `pdgate_request_slo`."""
    timings = event.timings
    if event.slo_met is not False:
        return "none"
    if timings is None or event.outcome is not Outcome.FINISHED:
        return "failed"
    if target.ttft_ms is None or timings.ttft_ms <= target.ttft_ms:
        return "decode"
    stages = {"queue": timings.queue_ms, "prefill": timings.prefill_ms, "transfer": timings.transfer_ms}
    stages["gateway"] = timings.ttft_ms - sum(stages.values())
    return max(stages, key=lambda stage: stages[stage])


def _path(placed: Placed | None, first: Slot | None) -> tuple[Path | None, HandOff | None]:
    """Return path and hand-off: from the notice, or from the phase of what streamed."""
    if placed is not None:
        return placed.path, placed.hand_off
    if first is None:
        return None, None
    return (Path.PD, HandOff.DIRECT) if first.phase is Phase.DECODE else (Path.UNIFIED, None)


def _finish_reason(first: Slot | None, cause: str) -> str:
    if cause == BUDGET_USED_UP:
        return FinishReason.LENGTH
    return first.reason if first is not None and first.reason is not None else ""


def _worker(slots: Slots, default: str) -> str:
    return slots[0].worker_id if 0 in slots else default
