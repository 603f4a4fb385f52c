"""Which worker or pair runs a request: predicted latency, prefix hits and room. Pure.

Filter, score, pick, on each side alone; a pair's cost is the sum of its sides', so the best pair is
the best prefill worker and the best decode worker among those that fit together. The result is a
`Placement` or `NoPlacement` of scheduler.policy.placement, with what the choice was made on.
"""

from collections.abc import Sequence

from contracts.lifecycle import HandOff, Path, Role
from scheduler.policy.cluster import ClusterView, Compatibility, RequestView, WorkerView
from scheduler.policy.outlook import Outlook, ScoringLimits
from scheduler.policy.placement import HOPE, NoPlacement, Placement, Reason
from scheduler.policy.sides import (
    Side,
    copy_of,
    decode_sides,
    pick,
    prefill_sides,
    short_tokens,
    step_with,
    unified_sides,
)


class Scored(Placement, frozen=True, kw_only=True):
    """A placement and what was predicted for it."""

    cached_tokens: int
    """Prefix hit on the worker that computes the prompt."""
    promised_kv_tokens: int
    """KV memory to count against the decode or unified worker."""
    decoding_kv_tokens: int
    """The part of it that is held half-way through the answer: what makes the worker's steps longer."""
    predicted_ttft_ms: float
    predicted_step_ms: float


class NotScored(NoPlacement, frozen=True, kw_only=True):
    """Nowhere, and which role lacks room; None when no worker of any kind could ever take it."""

    short_of: Role | None


def score(request: RequestView, cluster: ClusterView, limits: ScoringLimits, outlook: Outlook) -> Scored | NotScored:
    """Choose where `request` runs, or say which role is short of room.

    A unified worker takes a request when there is no pair; when none has room, unless one could still be in time
    later and this worker would not; when the prompt is short and its memory is no fuller than the decode worker's;
    when the prompt would wait for a prefill worker and be done sooner here; and when the pair would be late and it
    would be less so. All others take the pair.
    """
    promised = request.num_samples * (request.prompt_tokens + min(request.max_tokens, outlook.promised_output_tokens))
    whole = _whole_workers(request, cluster)
    sides = unified_sides(request, whole, limits, outlook, promised)
    unified = copy_of(sides, request.warm_replica) or pick(sides, limits, outlook)
    pairs = bool(cluster.prefill and cluster.decode)
    if request.warm_replica and pairs:
        return _pair(request, cluster, limits, outlook, promised)
    if not pairs or (outlook.background and cluster.unified):
        if unified is None:
            return NotScored(reason=_why(request, whole, promised), short_of=Role.UNIFIED)
        alone = Reason.WARMED if request.warm_replica else Reason.UNIFIED_POOL
        return _on_unified(request, unified, alone, promised, outlook)
    pair = _pair(request, cluster, limits, outlook, promised)
    if unified is not None:
        why = _why_unified(request, unified, pair, limits, outlook)
        if why is not None:
            return _on_unified(request, unified, why, promised, outlook)
    if isinstance(pair, NotScored):
        other = _why(request, whole, promised)
        if HOPE.index(other) < HOPE.index(pair.reason):  # what may still come from a unified worker decides
            return NotScored(reason=other, short_of=Role.UNIFIED)
    return pair


def _whole_workers(request: RequestView, cluster: ClusterView) -> Sequence[WorkerView]:
    """Return the workers that may do both phases of a request.

    With the store a role is a label: when one side of the pairs is gone, the other does its work as well.
    """
    sides = (cluster.prefill, cluster.decode)
    if request.hand_off is not HandOff.STORE or all(any(w.ready for w in side) for side in sides):
        return cluster.unified
    return cluster.workers


def _why_unified(
    request: RequestView, unified: Side, pair: Scored | NotScored, limits: ScoringLimits, outlook: Outlook
) -> Reason | None:
    """Return why a request is better off on the unified worker; None when it is not."""
    in_time_ms = (outlook.target.ttft_ms or float("inf")) * (1 - limits.slack)
    if isinstance(pair, NotScored) or pair.prefill is None:
        if pair.reason is Reason.NO_WORKER:
            return Reason.PAIR_DOWN
        soonest_ms = outlook.waited_ms + outlook.latency.prefill.ms(request.prompt_tokens)
        # A pair that has room again soon would be in time where this worker is not.
        return None if soonest_ms <= in_time_ms < unified.cost_ms else Reason.PAIR_FULL
    sooner = unified.cost_ms < pair.predicted_ttft_ms
    if unified.cost_ms > in_time_ms:
        return Reason.SOONER if sooner and pair.predicted_ttft_ms > in_time_ms else None
    worker, decode = unified.worker, pair.decode
    emptier = worker.kv_tokens * decode.kv_capacity_tokens <= decode.kv_tokens * worker.kv_capacity_tokens
    if emptier and request.prompt_tokens - unified.cached <= short_tokens(worker, limits, outlook):
        return Reason.SHORT_PROMPT
    return Reason.SOONER if sooner and pair.prefill.queued_prefill_tokens else None


def _on_unified(request: RequestView, side: Side, reason: Reason, promised: int, outlook: Outlook) -> Scored:
    worker = side.worker
    held = outlook.held_on_average(request.prompt_tokens, request.num_samples)
    return Scored(
        path=Path.FALLBACK if reason in (Reason.PAIR_FULL, Reason.PAIR_DOWN) else Path.UNIFIED,
        decode=worker,
        prefill=None,
        reason=reason,
        cached_tokens=side.cached,
        promised_kv_tokens=promised,
        decoding_kv_tokens=held,
        predicted_ttft_ms=side.cost_ms,
        predicted_step_ms=step_with(worker, request.num_samples, held, outlook),
    )


def _pair(
    request: RequestView, cluster: ClusterView, limits: ScoringLimits, outlook: Outlook, promised: int
) -> Scored | NotScored:
    decodes = decode_sides(request, cluster.decode, limits, outlook, promised)
    if not decodes:
        return NotScored(reason=_why(request, cluster.decode, promised), short_of=Role.DECODE)
    prefills = prefill_sides(request, cluster.prefill, limits, outlook)
    if copy := copy_of(prefills, request.warm_replica):
        prefills = [copy]
    barred = _barred(request, cluster)
    best = _best_pair(prefills, decodes, limits, outlook, barred)
    if best is None and not limits.same_zone:
        best = _best_pair(prefills, decodes, limits, outlook, barred, zones=False)
    if best is None:
        why = _why(request, cluster.prefill, request.prompt_tokens)
        if why is Reason.ALL_FULL and not _may_pair(request, cluster, limits):
            why = Reason.NO_WORKER  # both sides are there, but no two fit together
        return NotScored(reason=why, short_of=Role.PREFILL)
    prefill, decode = best
    return Scored(
        path=Path.PD,
        decode=decode.worker,
        prefill=prefill.worker,
        hand_off=request.hand_off,
        reason=Reason.WARMED if request.warm_replica else Reason.LEAST_LOADED_PAIR,
        cached_tokens=prefill.cached,
        promised_kv_tokens=promised,
        decoding_kv_tokens=outlook.held_on_average(request.prompt_tokens, request.num_samples),
        predicted_ttft_ms=prefill.cost_ms + outlook.latency.transfer.ms(request.prompt_tokens) + decode.cost_ms,
        predicted_step_ms=decode.cost_ms,
    )


def _barred(request: RequestView, cluster: ClusterView) -> frozenset[tuple[str, str]]:
    """Return the pairs that must not hand over; by the store nothing goes from one worker to the other."""
    return cluster.barred if request.hand_off is HandOff.DIRECT else frozenset()


def _kind(worker: WorkerView, *, zones: bool) -> tuple[Compatibility, str]:
    """Return what two workers must have in common to be a pair."""
    return worker.pairs_with, worker.zone if zones else ""


def _best_pair(
    prefills: Sequence[Side],
    decodes: Sequence[Side],
    limits: ScoringLimits,
    outlook: Outlook,
    barred: frozenset[tuple[str, str]],
    *,
    zones: bool = True,
) -> tuple[Side, Side] | None:
    """Return the cheapest prefill and decode side that fit together."""
    best: tuple[float, Side, Side] | None = None
    kinds = {_kind(side.worker, zones=zones) for side in prefills}
    for kind in kinds:
        givers, takers = prefills, decodes
        if len(kinds) > 1 or any(_kind(side.worker, zones=zones) != kind for side in decodes):
            givers = [side for side in prefills if _kind(side.worker, zones=zones) == kind]
            takers = [side for side in decodes if _kind(side.worker, zones=zones) == kind]
        decode = pick(takers, limits, outlook)
        prefill = pick(givers, limits, outlook, explore=True)
        if barred and prefill is not None:
            prefill, decode = _open_pair(givers, takers, limits, outlook, barred)
        if decode is not None and prefill is not None:
            cost_ms = prefill.cost_ms + decode.cost_ms
            if best is None or cost_ms < best[0]:
                best = (cost_ms, prefill, decode)
    return best[1:] if best is not None else None


def _open_pair(
    givers: Sequence[Side],
    takers: Sequence[Side],
    limits: ScoringLimits,
    outlook: Outlook,
    barred: frozenset[tuple[str, str]],
) -> tuple[Side | None, Side | None]:
    """Return the best decode side that has a prefill side it may be paired with, and the best of those."""
    left = list(takers)
    while (decode := pick(left, limits, outlook)) is not None:
        taker = decode.worker.worker_id
        able = [side for side in givers if (side.worker.worker_id, taker) not in barred]
        prefill = pick(able, limits, outlook, explore=True)
        if prefill is not None:
            return prefill, decode
        left = [side for side in left if side.worker.worker_id != taker]
    return None, None


def _may_pair(request: RequestView, cluster: ClusterView, limits: ScoringLimits) -> bool:
    """Whether any two ready workers fit together, with room or not."""
    zones = limits.same_zone
    ready = [w for w in cluster.prefill if w.ready and request.hand_off in w.hand_offs]
    takers = [w for w in cluster.decode if w.ready and request.hand_off in w.hand_offs]
    return any(
        _kind(giver, zones=zones) == _kind(taker, zones=zones)
        and (giver.worker_id, taker.worker_id) not in _barred(request, cluster)
        for giver in ready
        for taker in takers
    )


def _why(request: RequestView, workers: Sequence[WorkerView], kv_needed: int) -> Reason:
    """Return what a request without a place waits for."""
    ready = [w for w in workers if w.ready and request.hand_off in w.hand_offs]
    if not ready:
        return Reason.NO_WORKER
    possible = [w for w in ready if request.context_tokens <= w.context_tokens and kv_needed <= w.kv_capacity_tokens]
    if not possible:
        return Reason.TOO_LONG
    if all(w.worker_id in request.excluded for w in possible):
        return Reason.ALL_EXCLUDED
    return Reason.ALL_FULL
