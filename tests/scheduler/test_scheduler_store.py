"""Hand-off by the store: the prompt is computed on one worker, and the unchanged request runs on another."""

import msgspec
import pytest
from rig import FAST, SLOW_DECODE, SLOW_PREFILL, Rig, eventually, state_of

from contracts.lifecycle import FinishReason, HandOff, Path, Phase, RequestState, Role
from contracts.perf import PrefillCost
from contracts.wire import counts_from_pb, unpack_ids
from scheduler.profile import PoolProfile
from workers.engines.faults import DROP_KV
from workers.engines.timed_store import TimedStore
from workers.engines.timed_text import expected_ids, expected_text

NUM_TOKENS = 24
BRISK_PREFILL = msgspec.structs.replace(FAST, prefill=PrefillCost(fixed_ms=40.0, per_token_ms=0.0))
SECONDS_OF_PREFILL = msgspec.structs.replace(FAST, prefill=PrefillCost(fixed_ms=1500.0, per_token_ms=0.0))


class StorePool:
    """Workers on one store, and a scheduler that uses it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.store = TimedStore("tiny-r1")

    async def worker(self, role: Role, latency=FAST, **facts):
        return await self.rig.worker(role, latency, hand_off=HandOff.STORE, store=self.store, **facts)

    def scheduler(self):
        return self.rig.scheduler(profile=PoolProfile(hand_off=HandOff.STORE))


@pytest.fixture
def pool(rig: Rig) -> StorePool:
    return StorePool(rig)


def text_of(request, attempts: int = 1) -> str:
    return "".join(request.texts.get((a, 0), "") for a in range(1, attempts + 1))


def whole_text(request) -> str:
    return expected_text(unpack_ids(request.submit.prompt), NUM_TOKENS)


async def test_the_decode_worker_finds_the_prompt_in_the_store(rig: Rig, pool: StorePool):
    prefill, decode = await pool.worker(Role.PREFILL), await pool.worker(Role.DECODE)
    gateway = await rig.gateway()
    leading = await rig.leading(pool.scheduler())
    request = await gateway.submit(100, max_tokens=NUM_TOKENS)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await eventually(lambda: (1, 0, Phase.PREFILL) in request.finished)
    assert text_of(request) == whole_text(request)
    assert (request.placed[0].path, request.placed[0].hand_off) == (Path.PD, HandOff.STORE)
    first = counts_from_pb(request.finished[1, 0, Phase.PREFILL].counts)
    second = counts_from_pb(request.finished[1, 0, Phase.DECODE].counts)
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens) == (100, 0, 0)
    assert (second.prompt_tokens, second.cached_tokens, second.completion_tokens) == (100, 96, NUM_TOKENS)
    assert [len(w.submitted) for w in (prefill, decode)] == [1, 1]
    await eventually(lambda: state_of(leading, request) is RequestState.FINISHED)
    again = await gateway.submit(max_tokens=NUM_TOKENS, prompt=request.submit.prompt, cache_salt="another tenant")
    await eventually(lambda: again.reason() is FinishReason.LENGTH)
    await eventually(lambda: (1, 0, Phase.PREFILL) in again.finished)
    assert counts_from_pb(again.finished[1, 0, Phase.PREFILL].counts).cached_tokens == 0


async def test_what_the_store_lost_is_computed_again_and_what_it_garbled_shows(rig: Rig, pool: StorePool):
    """The control: the decode worker's text does come from the store's pages."""
    await pool.worker(Role.PREFILL, BRISK_PREFILL)
    decode = await pool.worker(Role.DECODE)
    gateway = await rig.gateway()
    await rig.leading(pool.scheduler())
    add = pool.store.add
    pool.store.add = lambda ids, salt: None  # an owner that is lost takes its pages along
    emptied = await gateway.submit(100, max_tokens=NUM_TOKENS)
    await eventually(lambda: emptied.reason() is FinishReason.LENGTH)
    assert text_of(emptied) == whole_text(emptied)
    assert counts_from_pb(emptied.finished[1, 0, Phase.DECODE].counts).cached_tokens == 0
    pool.store.add = add
    decode.faults.on.add(DROP_KV)
    garbled = await gateway.submit(100, max_tokens=NUM_TOKENS)
    await eventually(lambda: garbled.reason() is FinishReason.LENGTH)
    assert text_of(garbled) != whole_text(garbled)


async def test_one_prompt_serves_all_samples(rig: Rig, pool: StorePool):
    prefill, decode = await pool.worker(Role.PREFILL), await pool.worker(Role.DECODE)
    gateway = await rig.gateway()
    await rig.leading(pool.scheduler())
    request = await gateway.submit(100, max_tokens=NUM_TOKENS, num_samples=3)
    await eventually(lambda: all(request.reason(sample=s) is FinishReason.LENGTH for s in range(3)))
    assert [a.sample for a in prefill.submitted] == [0]
    assert sorted(a.sample for a in decode.submitted) == [0, 1, 2]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_lost_during_the_prefill_is_replaced_without_asking(rig: Rig, pool: StorePool, victim: str):
    prefill = await pool.worker(Role.PREFILL, SLOW_PREFILL)
    decode = await pool.worker(Role.DECODE)
    gateway = await rig.gateway()
    leading = await rig.leading(pool.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS)
    await eventually(lambda: prefill.submitted)
    assert not decode.submitted  # it hears of the request when the prompt is there
    spare = await pool.worker(Role.UNIFIED)
    await {"prefill": prefill, "decode": decode}[victim].kill()
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert [(n.attempt, n.retrying) for n in request.lost] == [(1, True)]
    assert request.placed[-1].decode.worker_id in (spare.worker_id, decode.worker_id)
    await eventually(lambda: state_of(leading, request) is RequestState.FINISHED)


async def test_a_lost_decode_worker_costs_no_token_and_its_prompt_is_still_stored(rig: Rig, pool: StorePool):
    await pool.worker(Role.PREFILL)
    decode = await pool.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    leading = await rig.leading(pool.scheduler())
    request = await gateway.submit(100, max_tokens=NUM_TOKENS)
    await eventually(lambda: len(request.tokens.get((1, 0), [])) >= 5)
    await decode.kill()
    await pool.worker(Role.DECODE)
    await eventually(lambda: request.lost)
    await gateway.go_on(request, lost_attempt=1)
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert text_of(request, 2) == whole_text(request)
    prefill = counts_from_pb(request.finished[2, 0, Phase.PREFILL].counts)
    assert prefill.prompt_tokens == 100 + len(request.tokens[1, 0])
    assert prefill.cached_tokens >= 96
    saved = leading.term.retries._instruments.registry.get_sample_value(
        "pdgate_saved_prefill_tokens_total", {"pool": "tiny", "hand_off": "store"}
    )
    assert saved == prefill.cached_tokens


async def test_without_a_prefill_worker_the_decode_workers_do_both(rig: Rig, pool: StorePool):
    prefill = await pool.worker(Role.PREFILL, SECONDS_OF_PREFILL)
    decode = await pool.worker(Role.DECODE)
    gateway = await rig.gateway()
    await rig.leading(pool.scheduler())
    requests = [await gateway.submit(max_tokens=NUM_TOKENS) for _ in range(2)]
    await eventually(lambda: prefill.submitted)
    await prefill.kill()
    await eventually(lambda: all(r.reason(attempt=len(r.placed)) is FinishReason.LENGTH for r in requests))
    assert not any(r.refused for r in requests)
    assert {r.placed[-1].path for r in requests} <= {Path.FALLBACK, Path.UNIFIED}
    assert {r.placed[-1].decode.worker_id for r in requests} == {decode.worker_id}


async def test_a_client_that_leaves_during_the_prefill_leaves_nothing_behind(rig: Rig, pool: StorePool):
    prefill, decode = await pool.worker(Role.PREFILL, SLOW_PREFILL), await pool.worker(Role.DECODE)
    gateway = await rig.gateway()
    leading = await rig.leading(pool.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS)
    await eventually(lambda: prefill.running)
    await gateway.abort(request)
    await eventually(lambda: state_of(leading, request) is RequestState.ABORTED)
    assert prefill.running == decode.running == 0
    assert not decode.submitted
    assert all(not w.charges for w in leading.registry.workers())


@pytest.mark.parametrize("when", ["prefilling", "decoding"])
async def test_a_new_leader_goes_on_with_both_halves(rig: Rig, pool: StorePool, when: str):
    prefill = await pool.worker(Role.PREFILL, SECONDS_OF_PREFILL)
    decode = await pool.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    leader = await rig.leading(pool.scheduler())
    request = await gateway.submit(100, max_tokens=NUM_TOKENS)
    await eventually((lambda: prefill.running) if when == "prefilling" else (lambda: request.tokens))
    await rig.kill(leader)
    second = await rig.leading(pool.scheduler())
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    assert request.tokens[1, 0] == expected_ids(unpack_ids(request.submit.prompt), NUM_TOKENS)
    assert [p.attempt for p in request.placed] == [1]
    assert len(decode.submitted) == 1
    await eventually(lambda: state_of(second, request) is RequestState.FINISHED)


async def test_a_role_is_changed_without_a_drain_under_running_requests(rig: Rig, pool: StorePool):
    prefill, decode = await pool.worker(Role.PREFILL), await pool.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    leading = await rig.leading(pool.scheduler())
    request = await gateway.submit(100, max_tokens=NUM_TOKENS)
    await eventually(lambda: request.tokens)
    result = await leading.actuator.flip(decode.worker_id, Role.PREFILL, why="test")
    assert result.ok
    await eventually(lambda: decode.server.condition.role is Role.PREFILL)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    assert text_of(request) == whole_text(request)
    other = await gateway.submit(100, max_tokens=NUM_TOKENS, prompt=request.submit.prompt)
    await eventually(lambda: other.reason() is FinishReason.LENGTH)
    assert counts_from_pb(next(iter(other.finished.values())).counts).cached_tokens >= 96  # nothing was wiped
    assert not prefill.dead
