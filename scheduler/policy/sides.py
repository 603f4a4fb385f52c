"""The workers that could do one phase of a request, or both: what each costs, and which of them is best. Pure."""

import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from scheduler.policy.cluster import RequestView, WorkerView
from scheduler.policy.outlook import NO_HITS, Outlook, ScoringLimits


class Side(msgspec.Struct, frozen=True):
    """One worker on one side of a path."""

    worker: WorkerView
    cost_ms: float  # what it adds to TTFT, or its decode step
    cached: int = 0
    favour_ms: float = 0.0

    @property
    def rank_ms(self) -> float:
        """What sides are compared by."""
        return self.cost_ms - self.favour_ms


def prefill_sides(
    request: RequestView, workers: Iterable[WorkerView], limits: ScoringLimits, outlook: Outlook
) -> list[Side]:
    """Return the workers that could compute the prompt, at the time until it is computed."""
    cost = outlook.latency.prefill
    usable = [w for w in workers if _can(w, request, request.prompt_tokens * request.num_samples)]
    hits = _trusted_hits(usable, limits, outlook)
    home = _home(usable, limits, outlook)
    sides = []
    for worker in usable:
        stretch = 1.0
        if worker.num_decoding:  # by the store a role is a label: what decoded here before still does
            stretch = _stretch(worker, outlook.latency.decode.step_ms(*worker.batch), limits, outlook)
        queued_ms = worker.queued_prefill_tokens * cost.per_token_ms * stretch
        if queued_ms > limits.prefill_quota_ms:
            continue
        cached = min(hits.get(worker.worker_id, 0), request.prompt_tokens - 1)
        own_ms = cost.ms(request.prompt_tokens - cached, cached) * request.num_samples * stretch
        favour_ms = limits.affinity_ms if worker is home else 0.0
        sides.append(Side(worker, outlook.waited_ms + queued_ms + own_ms, cached, favour_ms))
    return sides


def copy_of(sides: Sequence[Side], number: int) -> Side | None:
    """Return the side for copy `number` (from 1) of a prompt: first those that hold most of it; None when 0 is asked.

    So asking again warms the same workers, whatever their load, and a copy that was lost is made where it is least.
    """
    if not number or not sides:
        return None
    ranked = sorted(sides, key=lambda side: (-side.cached, 0.0 if side.cached else side.cost_ms, side.worker.worker_id))
    return ranked[min(number, len(ranked)) - 1]


def decode_sides(
    request: RequestView, workers: Iterable[WorkerView], limits: ScoringLimits, outlook: Outlook, promised: int
) -> list[Side]:
    """Return the workers with room to decode, at their step with one more.

    `promised`: KV tokens to keep free.
    """
    samples = request.num_samples
    held = outlook.held_on_average(request.prompt_tokens, samples)
    limit_ms = outlook.tpot_limit_ms * limits.tpot_share * _part_of(limits, outlook)
    sides = []
    for worker in workers:
        if _can(worker, request, promised):
            step_ms = step_with(worker, samples, held, outlook)
            if step_ms <= limit_ms or not worker.num_requests:
                sides.append(Side(worker, step_ms))
    return sides


def unified_sides(
    request: RequestView, workers: Iterable[WorkerView], limits: ScoringLimits, outlook: Outlook, promised: int
) -> list[Side]:
    """Return the workers with room for both phases, at the time until the prompt is computed.

    `promised`: KV tokens to keep free.
    """
    cost, samples = outlook.latency.prefill, request.num_samples
    held = outlook.held_on_average(request.prompt_tokens, samples)
    limit_ms = outlook.tpot_limit_ms
    share = limits.unified_tpot_share * _part_of(limits, outlook)
    usable = [w for w in workers if _can(w, request, promised)]
    hits = _trusted_hits(usable, limits, outlook)
    home = _home(usable, limits, outlook)
    sides = []
    for worker in usable:
        step_ms = step_with(worker, samples, held, outlook)
        if step_ms > limit_ms * share and worker.num_requests:
            continue
        stretch = _stretch(worker, step_ms, limits, outlook)
        queued_ms = worker.queued_prefill_tokens * cost.per_token_ms * stretch
        if queued_ms > limits.prefill_quota_ms or (outlook.background and queued_ms > 0):
            continue
        cached = min(hits.get(worker.worker_id, 0), request.prompt_tokens - 1)
        own_ms = cost.ms(request.prompt_tokens - cached, cached) * samples * stretch
        favour_ms = limits.affinity_ms if worker is home else 0.0
        sides.append(Side(worker, outlook.waited_ms + queued_ms + own_ms, cached, favour_ms))
    return sides


def step_with(worker: WorkerView, samples: int, kv_tokens: int, outlook: Outlook) -> float:
    """Return a decode step of a worker with so much more on it, on average until those who share it end."""
    requests, held = worker.batch
    return outlook.latency.decode.step_ms(requests + samples, held + kv_tokens)


def _stretch(worker: WorkerView, step_ms: float, limits: ScoringLimits, outlook: Outlook) -> float:
    """Return how much longer prompts take beside decodes: they get what decodes leave of a step."""
    if not worker.batch[0] or outlook.tpot_limit_ms == float("inf"):
        return limits.mixing_cost
    return limits.mixing_cost / max(0.05, 1 - step_ms / (limits.mixed_share * outlook.tpot_limit_ms))


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


def short_tokens(worker: WorkerView, limits: ScoringLimits, outlook: Outlook) -> float:
    """Return the uncached tokens that a unified worker computes within its slack of a few steps."""
    target_ms, per_token_ms = outlook.tpot_limit_ms, outlook.latency.prefill.per_token_ms
    if target_ms == float("inf") or per_token_ms <= 0:
        return limits.unified_up_to_tokens
    step_ms = outlook.latency.decode.step_ms(*worker.batch) if worker.num_requests else 0.0
    slack_ms = max(0.0, target_ms - step_ms) * limits.unified_within_steps
    return min(limits.unified_up_to_tokens, slack_ms / per_token_ms)


def pick(sides: Sequence[Side], limits: ScoringLimits, outlook: Outlook, *, explore: bool = False) -> Side | None:
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
