"""Pairs: only workers that fit, and only after a KV cache has gone from one to the other."""

import msgspec
import pytest
from rig import FAST, SLOW_DECODE, Rig, eventually
from rig_gateway import POOL

from contracts.keys import attempts
from contracts.lifecycle import HandOff, Path, Role
from contracts.perf import DEFAULT_LATENCY
from contracts.slo import SloTarget
from contracts.wire import Placed
from scheduler.pairs import PairState
from scheduler.policy.cluster import ClusterView, Compatibility, RequestView, WorkerView
from scheduler.policy.outlook import NO_HITS, Outlook, ScoringLimits
from scheduler.policy.pairing import Unpaired, mismatch, unpaired
from scheduler.policy.ratio import Move
from scheduler.policy.scoring import NotScored, Scored, score
from workers.engines.faults import LOSE_HAND_OFF

SAME = Compatibility("r1", "bf16", 16, "mooncake")
PROMPT = 300


def view(worker_id: str, role: Role, **fields) -> WorkerView:
    values = {
        "epoch": 1, "ready": True, "pairs_with": SAME, "hand_offs": frozenset({HandOff.DIRECT}), "max_running": 8,
        "context_tokens": 4096, "kv_capacity_tokens": 10_000,
    }  # fmt: skip
    return WorkerView(worker_id=worker_id, role=role, **{**values, **fields})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("model_revision", "r2", Unpaired.REVISION),
        ("model", "other", Unpaired.MODEL),
        ("dtype", "fp16", Unpaired.DTYPE),
        ("kv_dtype", "fp8", Unpaired.KV_DTYPE),
        ("page_size", 64, Unpaired.PAGE_SIZE),
        ("tp_size", 2, Unpaired.TP),
        ("dp_size", 2, Unpaired.DP),
        ("transfer_backend", "nixl", Unpaired.BACKEND),
        ("engine", "timed", Unpaired.ENGINE),
        ("hash_format", "x", Unpaired.HASH_FORMAT),
    ],
)
def test_workers_that_differ_in_what_shapes_a_kv_cache_are_no_pair(field, value, why):
    other = msgspec.structs.replace(SAME, **{field: value})
    assert mismatch(SAME, other) is why
    assert mismatch(SAME, SAME) is None
    assert unpaired(view("p", Role.PREFILL), view("d", Role.DECODE, pairs_with=other)) is why


def test_role_and_address_in_force_decide_too():
    p, d = view("p", Role.PREFILL), view("d", Role.DECODE)
    assert unpaired(p, d) is None
    assert unpaired(d, p) is Unpaired.ROLE
    assert unpaired(view("p", Role.PREFILL, reachable=False), d) is Unpaired.NO_ADDRESS
    assert unpaired(p, view("d", Role.DECODE, hand_offs=frozenset({HandOff.STORE}))) is Unpaired.HAND_OFF


def scored(cluster: ClusterView) -> Scored | NotScored:
    outlook = Outlook(
        latency=DEFAULT_LATENCY, target=SloTarget(), resident_tpot_ms=100.0, output_tokens=16,
        promised_output_tokens=16, cached_tokens=NO_HITS, waited_ms=0.0, gives_way=False, affinity="", draw=0.5,
        background=False,
    )  # fmt: skip
    return score(RequestView(prompt_tokens=3000, max_tokens=16), cluster, ScoringLimits(), outlook)


def test_a_barred_pair_gets_nothing_and_its_workers_go_on_with_others():
    workers = (view("p0", Role.PREFILL), view("p1", Role.PREFILL), view("d0", Role.DECODE), view("d1", Role.DECODE))
    open_ids = {("p1", "d0")}
    barred = frozenset((p, d) for p in ("p0", "p1") for d in ("d0", "d1")) - open_ids
    got = scored(ClusterView.of(workers, barred=barred))
    assert isinstance(got, Scored)
    assert (got.prefill.worker_id, got.decode.worker_id) == ("p1", "d0")
    none = scored(ClusterView.of(workers, barred=barred | open_ids))
    assert isinstance(none, NotScored)


async def test_a_pair_is_probed_before_it_takes_traffic_and_the_probe_is_recorded_nowhere(rig: Rig):
    prefill = await rig.worker(Role.PREFILL, probes=True)
    decode = await rig.worker(Role.DECODE, probes=True)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(PROMPT)
    await eventually(lambda: request.of(Placed), "placed")
    pair = pool.registry.pairs.find(prefill.worker_id, decode.worker_id)
    assert pair.state is PairState.OPEN
    assert pair.probe_ms > 0
    first = prefill.submitted[0]
    assert first.rid != request.rid  # the probe went first
    await eventually(lambda: request.finished, "finished")
    assert await rig.redis.xlen(attempts(POOL)) == 0  # nobody records in the rig, and no probe did
    assert len(prefill.server.assignments.finals.all()) <= 1


async def test_incompatible_workers_are_never_paired_and_the_reason_is_counted(rig: Rig):
    await rig.worker(Role.PREFILL, probes=True)
    await rig.worker(Role.DECODE, probes=True, kv_dtype="fp8")
    unified = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(PROMPT)
    await eventually(lambda: request.of(Placed), "placed")
    placed = request.placed[0]
    assert (placed.path, placed.decode.worker_id) == (Path.FALLBACK, unified.worker_id)
    assert pool.registry.pairs.counts() == {"kv_dtype": 1}


async def test_a_cut_link_bars_its_pair_until_a_probe_goes_through_again(rig: Rig):
    prefill = await rig.worker(Role.PREFILL, probes=True, hand_off_timeout_s=0.2)
    decode = await rig.worker(Role.DECODE, probes=True, hand_off_timeout_s=0.2)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    pairs = pool.registry.pairs
    await eventually(lambda: pairs.counts() == {"open": 1}, "open")
    prefill.faults.on.add(LOSE_HAND_OFF)
    request = await gateway.submit(PROMPT)
    await eventually(lambda: pairs.find(prefill.worker_id, decode.worker_id).state is PairState.FAILED, "failed")
    unified = await rig.worker(Role.UNIFIED)
    await eventually(lambda: [p for p in request.of(Placed) if p.path is Path.FALLBACK], "fallback")
    later = await gateway.submit(PROMPT)
    await eventually(lambda: later.of(Placed), "placed")
    assert later.placed[0].path is Path.FALLBACK
    prefill.faults.on.clear()
    await eventually(lambda: pairs.counts() == {"open": 1}, "open again")
    await unified.kill()
    await eventually(
        lambda: not any(w.worker_id == unified.worker_id and w.ready for w in pool.registry.workers()),
        "its death is known",
    )
    last = await gateway.submit(PROMPT)
    await eventually(lambda: last.of(Placed), "placed")
    assert last.placed[0].path is Path.PD


async def test_a_flip_gives_the_worker_another_life_in_its_new_role(rig: Rig):
    prefill = await rig.worker(Role.PREFILL, probes=True)
    decodes = [await rig.worker(Role.DECODE, probes=True) for _ in range(2)]
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    epoch = decodes[0].epoch
    moved = await pool.actuator.flip(decodes[0].worker_id, Role.PREFILL, why="test")
    assert (moved.ok, moved.role) == (True, Role.PREFILL)
    assert moved.switch_ms > 0
    await eventually(lambda: pool.registry.pairs.counts() == {"open": 2}, "both pairs open")
    assert decodes[0].registration.epoch > epoch
    gateway.attach(decodes[0].registration.address)
    request = await gateway.submit(PROMPT)
    await eventually(lambda: request.finished and request.placed, "finished")
    assert request.placed[0].decode.worker_id == decodes[1].worker_id
    assert prefill.running == 0


async def test_a_flip_waits_for_what_runs_and_begin_takes_one_at_a_time(rig: Rig):
    await rig.worker(Role.PREFILL)
    decodes = [await rig.worker(Role.DECODE, SLOW_DECODE) for _ in range(2)]
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    requests = [await gateway.submit(PROMPT, max_tokens=20) for _ in range(4)]
    await eventually(lambda: all(r.of(Placed) for r in requests), "placed")
    move = Move(worker_id=decodes[0].worker_id, from_role=Role.DECODE, to_role=Role.PREFILL)
    assert pool.actuator.begin(move, "test")
    assert pool.actuator.busy
    assert not pool.actuator.begin(move, "test")
    await eventually(lambda: not pool.actuator.busy, "flipped")
    await eventually(lambda: all(r.finished for r in requests), "finished")
    assert not any(len(r.of(Placed)) > 1 for r in requests)  # none was started twice
    assert decodes[0].server.condition.role is Role.PREFILL


async def test_to_and_from_unified_is_a_restart_that_keeps_the_worker(rig: Rig):
    worker = await rig.worker(Role.UNIFIED, FAST)
    pool = await rig.leading(rig.scheduler())
    there = await pool.actuator.flip(worker.worker_id, Role.DECODE, why="test")
    await eventually(lambda: all(w.ready and w.role is Role.DECODE for w in pool.registry.workers()), "decode")
    back = await pool.actuator.flip(worker.worker_id, Role.UNIFIED, why="test")
    assert (there.ok, back.ok) == (True, True)
    assert there.switch_ms >= 50  # a restart's time, as told to the engine
