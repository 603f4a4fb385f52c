"""Which worker or pair runs a request: least loaded first. Pure."""

import enum
from collections.abc import Iterable, Sequence

import msgspec

from contracts.lifecycle import HandOff, Path
from scheduler.policy.cluster import ClusterView, Limits, RequestView, WorkerView


class Reason(enum.StrEnum):
    """Why a request went where it went, or nowhere. A metric label and a log field."""

    LEAST_LOADED_PAIR = "least_loaded_pair"
    SHORT_PROMPT = "short_prompt"  # a unified worker with room, pairs exist
    SOONER = "sooner"  # a unified worker is done with the prompt before a pair would begin
    UNIFIED_POOL = "unified_pool"  # the pool has no pair
    PAIR_DOWN = "pair_down"  # fallback: no ready pair
    WARMED = "warmed"  # only the prompt is wanted: where most of it is, or where the next copy goes
    LINK_DOWN = "link_down"  # by the store or a unified worker: the links between pairs fail or are slow
    PAIR_FULL = "pair_full"  # fallback: a ready pair has no room
    DEGRADED = "degraded"  # fallback: the degrade ladder sent it to a unified worker
    NO_WORKER = "no_worker"  # nothing is ready
    ALL_FULL = "all_full"
    ALL_EXCLUDED = "all_excluded"  # an attempt failed on each worker that could take it
    TOO_LONG = "too_long"  # for every ready worker, even an idle one


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Run it here. `prefill` is None on a unified worker."""

    path: Path
    decode: WorkerView
    prefill: WorkerView | None
    reason: Reason
    hand_off: HandOff | None = None
    """How the KV cache gets from one to the other; None on a unified worker."""


class NoPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Nowhere at this instant."""

    reason: Reason


def place(request: RequestView, cluster: ClusterView, limits: Limits) -> Placement | NoPlacement:
    """Choose the least loaded pair or unified worker that has room for `request`.

    A pair is preferred, except that prompts of up to `limits.unified_up_to_tokens` take a unified
    worker with room. Without a usable pair, unified workers are the fallback. Ties go to the lower
    worker id, so equal snapshots give equal decisions.
    """
    pairs_exist = bool(cluster.prefill and cluster.decode)
    pair = _Best.pair(request, cluster, limits)
    single = _Best.single(request, cluster, limits)
    unified = single.decode
    if pair.decode is not None and pair.prefill is not None:
        if unified is not None and request.prompt_tokens <= limits.unified_up_to_tokens:
            return Placement(path=Path.UNIFIED, decode=unified, prefill=None, reason=Reason.SHORT_PROMPT)
        return Placement(
            path=Path.PD,
            decode=pair.decode,
            prefill=pair.prefill,
            reason=Reason.LEAST_LOADED_PAIR,
            hand_off=request.hand_off,
        )
    if unified is not None:
        if not pairs_exist:
            return Placement(path=Path.UNIFIED, decode=unified, prefill=None, reason=Reason.UNIFIED_POOL)
        why = Reason.PAIR_FULL if pair.why is Reason.ALL_FULL else Reason.PAIR_DOWN
        return Placement(path=Path.FALLBACK, decode=unified, prefill=None, reason=why)
    return NoPlacement(reason=min(pair.why, single.why, key=HOPE.index))


HOPE: Sequence[Reason] = (Reason.ALL_FULL, Reason.ALL_EXCLUDED, Reason.TOO_LONG, Reason.NO_WORKER)
"""What a request waits for, the most hopeful first: it is told apart by whether waiting can help."""


class _Best(msgspec.Struct, frozen=True, kw_only=True):
    """The best choice on one kind of path, or why there is none."""

    decode: WorkerView | None = None
    prefill: WorkerView | None = None
    why: Reason = Reason.NO_WORKER

    @classmethod
    def single(cls, request: RequestView, cluster: ClusterView, limits: Limits) -> "_Best":
        needed = limits.promised_tokens(request.prompt_tokens, request.max_tokens, request.num_samples)
        candidates, why = _usable(cluster.unified, request, kv_needed=needed, context=request.context_tokens)
        return cls(decode=candidates[0]) if candidates else cls(why=why)

    @classmethod
    def pair(cls, request: RequestView, cluster: ClusterView, limits: Limits) -> "_Best":
        needed = limits.promised_tokens(request.prompt_tokens, request.max_tokens, request.num_samples)
        takes = [w for w in cluster.decode if request.hand_off in w.hand_offs]
        gives = [w for w in cluster.prefill if request.hand_off in w.hand_offs]
        decodes, decode_why = _usable(takes, request, kv_needed=needed, context=request.context_tokens)
        prompt_kv = request.prompt_tokens * request.num_samples
        prefills, prefill_why = _usable(gives, request, kv_needed=prompt_kv, context=request.prompt_tokens + 1)
        for decode in decodes:
            for prefill in prefills:
                barred = (prefill.worker_id, decode.worker_id) in cluster.barred
                if prefill.pairs_with == decode.pairs_with and not barred:
                    return cls(decode=decode, prefill=prefill)
        if decodes and prefills:
            return cls(why=Reason.NO_WORKER)  # ready, but no two fit together
        # The side that offers the least hope decides: a free partner does not help against it.
        missing = [why for found, why in ((decodes, decode_why), (prefills, prefill_why)) if not found]
        return cls(why=max(missing, key=HOPE.index))


def _usable(
    workers: Iterable[WorkerView], request: RequestView, *, kv_needed: int, context: int
) -> tuple[list[WorkerView], Reason]:
    """Return the workers with room for `request`, least loaded first, and why the list is empty if it is."""
    room: list[WorkerView] = []
    why = Reason.NO_WORKER
    for worker in workers:
        if not worker.ready:
            continue
        if (
            context > worker.context_tokens
            or kv_needed > worker.kv_capacity_tokens
            or request.num_samples > worker.max_running
        ):
            seen = Reason.TOO_LONG
        elif worker.worker_id in request.excluded:
            seen = Reason.ALL_EXCLUDED
        elif not _has_room(worker, request.num_samples, kv_needed):
            seen = Reason.ALL_FULL
        else:
            room.append(worker)
            continue
        why = min(why, seen, key=HOPE.index)
    if len(room) > 1:
        room.sort(key=lambda w: (w.load_tokens, w.num_requests, w.worker_id))
    return room, why


def _has_room(worker: WorkerView, num_samples: int, kv_needed: int) -> bool:
    return (
        worker.num_requests + num_samples <= worker.max_running
        and worker.kv_tokens + kv_needed <= worker.kv_capacity_tokens
    )
