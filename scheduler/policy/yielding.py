"""Which batch lines leave a unified worker, so that interactive work which finds no room gets it. Pure.

Batch work fills what is idle; when somebody who waits for an answer wants the room, it goes. It loses no token: what
the tenant's gateway has stays, and the line runs on from there later. The youngest lines go first, as they have the
least to compute again, and no more of them than make room. A line that was sent away `most_yields` times stays.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from scheduler.policy.cluster import ClusterView, WorkerView


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A batch line on a unified worker, and what it takes there."""

    request: str
    worker_id: str
    num_requests: int
    kv_tokens: int
    decoding_kv_tokens: int
    """What it holds half-way through its answer."""
    queued_prefill_tokens: int
    """Prompt tokens not yet computed."""
    since_ms: float
    """When it was placed."""


class YieldLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of giving way."""

    most_yields: int = 8
    """How often one line is sent away: from then on it ends where it is."""


def without(cluster: ClusterView, lines: Iterable[Line]) -> ClusterView:
    """Return the cluster as it is once these lines are gone."""
    gone: dict[str, list[Line]] = {}
    for line in lines:
        gone.setdefault(line.worker_id, []).append(line)
    if not gone:
        return cluster
    unified = tuple(_relieved(w, gone[w.worker_id]) if w.worker_id in gone else w for w in cluster.unified)
    return msgspec.structs.replace(cluster, unified=unified)


def who_yields(
    cluster: ClusterView, lines: Sequence[Line], leaving: Sequence[Line], fits: Callable[[ClusterView], str | None]
) -> Sequence[Line]:
    """Return the lines that have to go; empty = none would help, or those that leave already are enough.

    Args:
        cluster: the workers as they are.
        lines: what may be sent away.
        leaving: what was sent away and is still counted.
        fits: the unified worker where the one who waits would run; None = nowhere, or not in time.
    """
    left = without(cluster, leaving)
    if not lines or (leaving and fits(left) is not None):
        return ()
    where = fits(without(left, lines))
    mine = sorted((line for line in lines if line.worker_id == where), key=lambda line: -line.since_ms)
    number = 1
    while number < len(mine):
        if fits(without(left, mine[:number])) is not None:
            return mine[:number]
        number *= 2
    return mine


def _relieved(worker: WorkerView, lines: Sequence[Line]) -> WorkerView:
    num_lines = sum(line.num_requests for line in lines)
    decoding, held = worker.batch
    return msgspec.structs.replace(
        worker,
        num_requests=max(0, worker.num_requests - num_lines),
        num_decoding=max(0, decoding - num_lines),
        decoding_kv_tokens=max(0, held - sum(line.decoding_kv_tokens for line in lines)),
        kv_tokens=max(0, worker.kv_tokens - sum(line.kv_tokens for line in lines)),
        queued_prefill_tokens=max(0, worker.queued_prefill_tokens - sum(line.queued_prefill_tokens for line in lines)),
    )
