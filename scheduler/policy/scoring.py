"""Which worker or pair runs a request: predicted latency, prefix hits and room. Pure.

Filter, score, pick, on each side alone; a pair's cost is the sum of its sides', so the best pair is
the best prefill worker and the best decode worker among those that fit together. The result is a
`Placement` or `NoPlacement` of scheduler.policy.placement, with what the choice was made on.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from contracts.lifecycle import HandOff, Path, Role
from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from scheduler.policy.cluster import ClusterView, Compatibility, RequestView, WorkerView
from scheduler.policy.placement import HOPE, NoPlacement, Placement, Reason

NO_HITS: Mapping[str, int] = {}


class ScoringLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the scored placement."""

    unified_up_to_tokens: int = 2048
    """Uncached prompt tokens up to which a unified worker is tried before a pair."""
    unified_within_steps: float = 2.0
    """The same limit as slack of this many decode steps; the lower one counts."""
    prefill_quota_ms: float = 250.0
    """Queued work up to which a prefill worker gets more. The rest waits in the scheduler, in its order."""
    tpot_share: float = 1.0
    """Share of the TPOT target up to which a decode worker's predicted step may grow."""
    unified_tpot_share: float = 0.88
    """The same on unified workers: what is left is for prompts."""
    mixing_cost: float = 1.1
    """Cost of prompt tokens beside decodes over their cost alone."""
    late_share: float = 0.8
    """The part of either share that requests which give way may fill: the rest is for those in time."""
    slack: float = 0.1
    """Share of a target kept as a reserve when a path is judged."""
    near_ms: float = 3.0
    """Costs closer than this are equal; load, then the draw decides."""
    explore: float = 0.01
    """Share of requests sent to the second best prefill worker, so that its estimate stays honest."""
    affinity_ms: float = 30.0
    """What a session's home worker may be slower than the best."""
    affinity_load: float = 1.25
    """A session's home worker is kept while its load is at most this multiple of the mean (bounded loads)."""
    affinity_requests: int = 4
    """The same as a number of requests, for pools with little load; the higher bound counts."""
    prefix_load_gap: int = 64
    same_zone: bool = True
    """Whether both sides of a pair must be in one zone. If not, a pair in one zone still goes first."""
    prefix_load_ratio: float = 1.5
    """A worker's prefix hits do not count while it has more requests than the least loaded one by both."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What is known or guessed of one request, besides its size."""

    latency: LatencyModel
    """Costs of a worker of the pool."""
    target: SloTarget
    """The request's own targets."""
    resident_tpot_ms: float | None = None
    """TPOT target of the requests already on the workers; None = the request's own."""
    output_tokens: float
    """Expected output."""
    promised_output_tokens: int
    """Output for which KV memory is kept free."""
    cached_tokens: Mapping[str, int] = NO_HITS
    """Prompt tokens in each worker's prefix cache; absent = 0."""
    waited_ms: float = 0.0
    gives_way: bool = False
    """It is late already, and it is not its turn to go first all the same (FairQueue.gives_way)."""
    affinity: str = ""
    """Session or cache key; empty = none."""
    draw: float = 0.5
    """Uniform in [0, 1): the caller's randomness."""
    background: bool = False
    """Batch work: unified workers only, and only where it delays nobody."""

    @property
    def tpot_limit_ms(self) -> float:
        """Return the decode step that hurts nobody; infinite without a target."""
        own = self.target.tpot_ms or float("inf")
        return min(own, self.resident_tpot_ms or float("inf"))


class Scored(Placement, frozen=True, kw_only=True):
    """A placement and what was predicted for it."""

    cached_tokens: int
    """Prefix hit on the worker that computes the prompt."""
    promised_kv_tokens: int
    """KV memory to count against the decode or unified worker."""
    predicted_ttft_ms: float
    predicted_step_ms: float


class NotScored(NoPlacement, frozen=True, kw_only=True):
    """Nowhere, and which role lacks room; None when no worker of any kind could ever take it."""

    short_of: Role | None


class _Side(msgspec.Struct, frozen=True):
    """One worker on one side of a path."""

    worker: WorkerView
    cost_ms: float  # what it adds to TTFT, or its decode step
    cached: int = 0
    favour_ms: float = 0.0

    @property
    def rank_ms(self) -> float:
        """What sides are compared by."""
        return self.cost_ms - self.favour_ms


def score(request: RequestView, cluster: ClusterView, limits: ScoringLimits, outlook: Outlook) -> Scored | NotScored:
    """Choose where `request` runs, or say which role is short of room.

    A unified worker takes a request when there is no pair or none with room; when the prompt is short and
    its memory is no fuller than the decode worker's; when the prompt would wait for a prefill worker and be
    done sooner here; and when the pair would be late and it would be less so. All others take the pair.
    """
    promised = request.num_samples * (request.prompt_tokens + min(request.max_tokens, outlook.promised_output_tokens))
    whole = _whole_workers(request, cluster)
    sides = _unified(request, whole, limits, outlook, promised)
    unified = _copy(sides, request.warm_replica) or _pick(sides, limits, outlook)
    pairs = bool(cluster.prefill and cluster.decode)
    if request.warm_replica and pairs:
        return _pair(request, cluster, limits, outlook, promised)
    if not pairs or (outlook.background and cluster.unified):
        if unified is None:
            return NotScored(reason=_why(request, whole, promised), short_of=Role.UNIFIED)
        alone = Reason.WARMED if request.warm_replica else Reason.UNIFIED_POOL
        return _on_unified(unified, alone, promised, outlook)
    pair = _pair(request, cluster, limits, outlook, promised)
    if unified is not None:
        why = _why_unified(request, unified, pair, limits, outlook)
        if why is not None:
            return _on_unified(unified, why, promised, outlook)
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
    request: RequestView, unified: "_Side", pair: Scored | NotScored, limits: ScoringLimits, outlook: Outlook
) -> Reason | None:
    """Return why a request is better off on the unified worker; None when it is not."""
    if isinstance(pair, NotScored) or pair.prefill is None:
        return Reason.PAIR_DOWN if pair.reason is Reason.NO_WORKER else Reason.PAIR_FULL
    in_time_ms = (outlook.target.ttft_ms or float("inf")) * (1 - limits.slack)
    sooner = unified.cost_ms < pair.predicted_ttft_ms
    if unified.cost_ms > in_time_ms:
        return Reason.SOONER if sooner and pair.predicted_ttft_ms > in_time_ms else None
    worker, decode = unified.worker, pair.decode
    emptier = worker.kv_tokens * decode.kv_capacity_tokens <= decode.kv_tokens * worker.kv_capacity_tokens
    if emptier and request.prompt_tokens - unified.cached <= _short(worker, limits, outlook):
        return Reason.SHORT_PROMPT
    return Reason.SOONER if sooner and pair.prefill.queued_prefill_tokens else None


def _on_unified(side: _Side, reason: Reason, promised: int, outlook: Outlook) -> Scored:
    worker = side.worker
    return Scored(
        path=Path.FALLBACK if reason in (Reason.PAIR_FULL, Reason.PAIR_DOWN) else Path.UNIFIED,
        decode=worker,
        prefill=None,
        reason=reason,
        cached_tokens=side.cached,
        promised_kv_tokens=promised,
        predicted_ttft_ms=side.cost_ms,
        predicted_step_ms=outlook.latency.decode.step_ms(worker.num_requests + 1, worker.kv_tokens + promised),
    )


def _pair(
    request: RequestView, cluster: ClusterView, limits: ScoringLimits, outlook: Outlook, promised: int
) -> Scored | NotScored:
    decodes = _decodes(request, cluster.decode, limits, outlook, promised)
    if not decodes:
        return NotScored(reason=_why(request, cluster.decode, promised), short_of=Role.DECODE)
    prefills = _prefills(request, cluster.prefill, limits, outlook)
    if copy := _copy(prefills, request.warm_replica):
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
    prefills: Sequence[_Side],
    decodes: Sequence[_Side],
    limits: ScoringLimits,
    outlook: Outlook,
    barred: frozenset[tuple[str, str]],
    *,
    zones: bool = True,
) -> tuple[_Side, _Side] | None:
    """Return the cheapest prefill and decode side that fit together."""
    best: tuple[float, _Side, _Side] | None = None
    kinds = {_kind(side.worker, zones=zones) for side in prefills}
    for kind in kinds:
        givers, takers = prefills, decodes
        if len(kinds) > 1 or any(_kind(side.worker, zones=zones) != kind for side in decodes):
            givers = [side for side in prefills if _kind(side.worker, zones=zones) == kind]
            takers = [side for side in decodes if _kind(side.worker, zones=zones) == kind]
        decode = _pick(takers, limits, outlook)
        prefill = _pick(givers, limits, outlook, explore=True)
        if barred and prefill is not None:
            prefill, decode = _open_pair(givers, takers, limits, outlook, barred)
        if decode is not None and prefill is not None:
            cost_ms = prefill.cost_ms + decode.cost_ms
            if best is None or cost_ms < best[0]:
                best = (cost_ms, prefill, decode)
    return best[1:] if best is not None else None


def _open_pair(
    givers: Sequence[_Side],
    takers: Sequence[_Side],
    limits: ScoringLimits,
    outlook: Outlook,
    barred: frozenset[tuple[str, str]],
) -> tuple[_Side | None, _Side | None]:
    """Return the best decode side that has a prefill side it may be paired with, and the best of those."""
    left = list(takers)
    while (decode := _pick(left, limits, outlook)) is not None:
        taker = decode.worker.worker_id
        able = [side for side in givers if (side.worker.worker_id, taker) not in barred]
        prefill = _pick(able, limits, outlook, explore=True)
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


# -- sides ---------------------------------------------------------------------------------------------------


def _prefills(
    request: RequestView, workers: Iterable[WorkerView], limits: ScoringLimits, outlook: Outlook
) -> list[_Side]:
    cost = outlook.latency.prefill
    usable = [w for w in workers if _can(w, request, request.prompt_tokens * request.num_samples)]
    hits = _trusted_hits(usable, limits, outlook)
    home = _home(usable, limits, outlook)
    sides = []
    for worker in usable:
        queued_ms = worker.queued_prefill_tokens * cost.per_token_ms
        if queued_ms > limits.prefill_quota_ms:
            continue
        cached = min(hits.get(worker.worker_id, 0), request.prompt_tokens - 1)
        own_ms = cost.ms(request.prompt_tokens - cached, cached) * request.num_samples
        favour_ms = limits.affinity_ms if worker is home else 0.0
        sides.append(_Side(worker, outlook.waited_ms + queued_ms + own_ms, cached, favour_ms))
    return sides


def _copy(sides: Sequence[_Side], number: int) -> _Side | None:
    """Return the side for copy `number` (from 1) of a prompt: first those that hold most of it; None when 0 is asked.

    So asking again warms the same workers, whatever their load, and a copy that was lost is made where it is least.
    """
    if not number or not sides:
        return None
    ranked = sorted(sides, key=lambda side: (-side.cached, 0.0 if side.cached else side.cost_ms, side.worker.worker_id))
    return ranked[min(number, len(ranked)) - 1]


def _decodes(
    request: RequestView, workers: Iterable[WorkerView], limits: ScoringLimits, outlook: Outlook, promised: int
) -> list[_Side]:
    decode, samples = outlook.latency.decode, request.num_samples
    limit_ms = outlook.tpot_limit_ms * limits.tpot_share * _part_of(limits, outlook)
    sides = []
    for worker in workers:
        if _can(worker, request, promised):
            step_ms = decode.step_ms(worker.num_requests + samples, worker.kv_tokens + promised)
            if step_ms <= limit_ms or not worker.num_requests:
                sides.append(_Side(worker, step_ms))
    return sides


def _unified(
    request: RequestView, workers: Iterable[WorkerView], limits: ScoringLimits, outlook: Outlook, promised: int
) -> list[_Side]:
    cost, decode, samples = outlook.latency.prefill, outlook.latency.decode, request.num_samples
    limit_ms = outlook.tpot_limit_ms
    share = limits.unified_tpot_share * _part_of(limits, outlook)
    usable = [w for w in workers if _can(w, request, promised)]
    hits = _trusted_hits(usable, limits, outlook)
    home = _home(usable, limits, outlook)
    sides = []
    for worker in usable:
        step_ms = decode.step_ms(worker.num_requests + samples, worker.kv_tokens + promised)
        if step_ms > limit_ms * share and worker.num_requests:
            continue
        # Prompts get what a step at the limit leaves; all of it when nothing decodes.
        left = 1.0 if not worker.num_requests or limit_ms == float("inf") else max(0.05, 1 - step_ms / limit_ms)
        queued_ms = worker.queued_prefill_tokens * cost.per_token_ms * limits.mixing_cost / left
        if queued_ms > limits.prefill_quota_ms or (outlook.background and queued_ms > 0):
            continue
        cached = min(hits.get(worker.worker_id, 0), request.prompt_tokens - 1)
        own_ms = cost.ms(request.prompt_tokens - cached, cached) * samples * limits.mixing_cost / left
        favour_ms = limits.affinity_ms if worker is home else 0.0
        sides.append(_Side(worker, outlook.waited_ms + queued_ms + own_ms, cached, favour_ms))
    return sides


def _part_of(limits: ScoringLimits, outlook: Outlook) -> float:
    return limits.late_share if outlook.background or outlook.gives_way else 1.0


def _can(worker: WorkerView, request: RequestView, kv_needed: int) -> bool:
    return (
        worker.ready
        and request.hand_off in worker.hand_offs
        and worker.kv_tokens + kv_needed <= worker.kv_capacity_tokens
        and worker.num_requests + request.num_samples <= worker.max_running
        and request.context_tokens <= worker.context_tokens
        and worker.worker_id not in request.excluded
    )


def _short(worker: WorkerView, limits: ScoringLimits, outlook: Outlook) -> float:
    """Return the uncached tokens that a unified worker computes within its slack of a few steps."""
    target_ms, per_token_ms = outlook.tpot_limit_ms, outlook.latency.prefill.per_token_ms
    if target_ms == float("inf") or per_token_ms <= 0:
        return limits.unified_up_to_tokens
    step_ms = outlook.latency.decode.step_ms(worker.num_requests, worker.kv_tokens) if worker.num_requests else 0.0
    slack_ms = max(0.0, target_ms - step_ms) * limits.unified_within_steps
    return min(limits.unified_up_to_tokens, slack_ms / per_token_ms)


# -- picking -------------------------------------------------------------------------------------------------


def _pick(sides: Sequence[_Side], limits: ScoringLimits, outlook: Outlook, *, explore: bool = False) -> _Side | None:
    """Return the cheapest side; among near equals the less loaded of two drawn ones."""
    if not sides:
        return None
    if len(sides) == 1:
        return sides[0]
    best = min(sides, key=lambda side: (side.rank_ms, side.worker.worker_id))
    near = [side for side in sides if side.rank_ms - best.rank_ms <= limits.near_ms]
    if explore and outlook.draw < limits.explore:
        others = [side for side in sides if side is not best]
        return min(others, key=lambda side: (side.rank_ms, side.worker.worker_id))
    if len(near) == 1:
        return best
    first = int(outlook.draw * len(near))
    second = (first + 1 + int(outlook.draw * 997) % (len(near) - 1)) % len(near)
    return min(near[first], near[second], key=lambda side: (side.worker.load_tokens, side.rank_ms))


def _trusted_hits(workers: Sequence[WorkerView], limits: ScoringLimits, outlook: Outlook) -> Mapping[str, int]:
    """Return prefix hits without those of overloaded workers; each worker is judged alone."""
    if not outlook.cached_tokens or not workers:
        return NO_HITS
    least = min(worker.num_requests for worker in workers)
    bound = max(least + limits.prefix_load_gap, least * limits.prefix_load_ratio)
    hits = outlook.cached_tokens
    return {w.worker_id: hits[w.worker_id] for w in workers if w.worker_id in hits and w.num_requests <= bound}


def _home(workers: Sequence[WorkerView], limits: ScoringLimits, outlook: Outlook) -> WorkerView | None:
    """Return the session's worker: highest hash among those within the load bound (rendezvous hashing)."""
    if not outlook.affinity or not workers:
        return None
    mean = (sum(w.num_requests for w in workers) + 1) / len(workers)
    bound = max(limits.affinity_load * mean, limits.affinity_requests)
    within = [w for w in workers if w.num_requests <= bound]
    return max(within, key=lambda w: _weight(outlook.affinity, w.worker_id), default=None)


def _weight(session: str, worker_id: str) -> int:
    # CRC-32 alone is linear: names that differ in one place would rank alike. The multiplication breaks that.
    return zlib.crc32(f"{session}\0{worker_id}".encode()) * 0x9E3779B1 & 0xFFFFFFFF


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
