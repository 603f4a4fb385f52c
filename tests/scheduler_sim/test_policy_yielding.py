"""Which batch lines leave: the youngest, no more than needed, and none in vain."""

from scheduler.policy.cluster import ClusterView, Compatibility, WorkerView
from scheduler.policy.yielding import Line, who_yields, without

KIND = Compatibility("r", "bf16", 16, "none")


def unified(worker_id: str, *, requests: int, kv: int = 0) -> WorkerView:
    return WorkerView(
        worker_id=worker_id,
        epoch=1,
        role="unified",
        ready=True,
        pairs_with=KIND,
        hand_offs=frozenset(),
        max_running=8,
        context_tokens=4096,
        kv_capacity_tokens=10_000,
        num_requests=requests,
        kv_tokens=kv,
    )


def line(request: str, worker_id: str, since_ms: float, kv: int = 1000) -> Line:
    return Line(
        request=request,
        worker_id=worker_id,
        num_requests=1,
        kv_tokens=kv,
        decoding_kv_tokens=kv,
        queued_prefill_tokens=0,
        since_ms=since_ms,
    )


def room_for(kv: int):
    """Return a placement: the first unified worker with a slot and so many tokens free."""

    def fits(cluster: ClusterView) -> str | None:
        able = [w for w in cluster.unified if w.num_requests < w.max_running and w.kv_tokens + kv <= 10_000]
        return able[0].worker_id if able else None

    return fits


FULL = ClusterView(unified=(unified("a", requests=8, kv=9500), unified("b", requests=8, kv=9000)))
LINES = [line("old", "a", 10), line("young", "a", 30), line("middle", "a", 20), line("other", "b", 40, kv=200)]


def test_the_youngest_line_of_the_worker_where_it_helps_leaves():
    assert [item.request for item in who_yields(FULL, LINES, [], room_for(1000))] == ["young"]


def test_as_many_leave_as_the_request_needs():
    assert {item.request for item in who_yields(FULL, LINES, [], room_for(2400))} == {"young", "middle"}


def test_nobody_leaves_where_it_would_not_help():
    assert not who_yields(FULL, LINES, [], room_for(5000))
    assert not who_yields(FULL, [], [], room_for(1000))


def test_nobody_else_leaves_while_enough_are_leaving():
    leaving, rest = [LINES[1]], [LINES[0], LINES[2]]
    assert not who_yields(FULL, rest, leaving, room_for(1000))
    assert [item.request for item in who_yields(FULL, rest, leaving, room_for(2400))] == ["middle"]


def test_a_cluster_without_lines_counts_nothing_below_zero():
    seen = without(FULL, [line("x", "a", 0, kv=50_000)])
    assert (seen.unified[0].kv_tokens, seen.unified[0].num_requests) == (0, 7)
    assert seen.unified[1] is FULL.unified[1]
    assert without(FULL, []) is FULL
