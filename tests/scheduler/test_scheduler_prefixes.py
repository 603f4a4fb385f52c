"""The prefix index of a pool follows its workers' events and lives."""

import msgspec
from rig import FAST, Rig, all_ends_heard, eventually

from contracts.lifecycle import FinishReason, HandOff, Role, WorkerState
from contracts.prefix import BLOCK_TOKENS, HASH_FORMAT, pack_blocks, prompt_blocks, scope
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Registration, pack_ids
from scheduler.prefixes import Prefixes
from scheduler.worker import Worker


def worker(worker_id: str = "w", epoch: int = 1, **fields) -> Worker:
    known = {
        "worker_id": worker_id, "epoch": epoch, "pid": 0, "address": "a", "pool": "p", "role": Role.UNIFIED,
        "state": WorkerState.READY, "engine": "timed", "simulated": True, "model_path": "m", "model_revision": "r",
        "dtype": "", "kv_dtype": "", "page_size": 16, "tp_size": 1, "dp_size": 1, "transfer_backend": "",
        "bootstrap_host": "", "bootstrap_port": 0, "kv_capacity_tokens": 1000, "max_running": 8,
        "context_tokens": 4096, "hand_offs": (HandOff.DIRECT,), "catalog_revision": "", "started_unix_ms": 0,
        "hash_format": HASH_FORMAT,
    }  # fmt: skip
    return Worker(Registration(**{**known, **fields}))


def events(seq: int, *, stored=(), removed=(), cleared: bool = False) -> pb.KvEvents:
    return pb.KvEvents(seq=seq, cleared=cleared, stored=pack_blocks(stored), removed=pack_blocks(removed))


def test_events_say_what_a_worker_holds():
    prefixes, w = Prefixes(), worker()
    assert prefixes.heard(w, events(1, stored=[1, 2, 3]))
    assert prefixes.heard(w, events(2, removed=[3]))
    assert prefixes.index.match([1, 2, 3]) == {"w": 2}


def test_a_gap_forgets_the_worker_and_asks_again():
    prefixes, w = Prefixes(), worker()
    assert prefixes.heard(w, events(1, stored=[1, 2]))
    assert not prefixes.heard(w, events(3, stored=[3]))
    assert prefixes.index.match([1, 2, 3]) == {}
    assert prefixes.heard(w, events(4, cleared=True, stored=[1]))
    assert prefixes.heard(w, events(5, stored=[2]))
    assert prefixes.index.match([1, 2, 3]) == {"w": 2}


def test_another_life_of_a_worker_holds_nothing_of_the_one_before():
    prefixes = Prefixes()
    prefixes.heard(worker(epoch=1), events(1, stored=[1]))
    prefixes.heard(worker(epoch=2), events(1, stored=[7]))
    assert prefixes.index.match([1]) == {}
    assert prefixes.index.match([7]) == {"w": 1}


def test_names_made_otherwise_are_not_indexed():
    prefixes, w = Prefixes(), worker(hash_format="other")
    assert prefixes.heard(w, events(9, stored=[1]))
    assert prefixes.index.match([1]) == {}


async def test_equal_prompts_of_a_tenant_meet_and_those_of_another_salt_do_not(rig: Rig):
    slow = msgspec.structs.replace(FAST, prefill=msgspec.structs.replace(FAST.prefill, per_token_ms=0.2))
    workers = [await rig.worker(Role.UNIFIED, slow) for _ in range(4)]
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    prompt = pack_ids(range(5 * BLOCK_TOKENS + 1))
    for _ in range(6):
        request = await gateway.submit(prompt=prompt, cache_salt="a")
        await eventually(lambda r=request: r.reason() is FinishReason.LENGTH)
        await all_ends_heard(pool)
    assert sorted(len(w.submitted) for w in workers) == [0, 0, 0, 6]
    index = pool.memory.prefixes.index
    revision = pool.memory.router.revision
    assert len(index.match(prompt_blocks(prompt, scope(model_revision=revision, salt="a")))) == 1
    assert index.match(prompt_blocks(prompt, scope(model_revision=revision, salt="b"))) == {}


async def test_what_a_dead_worker_held_is_forgotten(rig: Rig):
    first = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    prompt = pack_ids(range(3 * BLOCK_TOKENS))
    request = await gateway.submit(prompt=prompt)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    blocks = prompt_blocks(prompt, scope(model_revision=pool.memory.router.revision))
    assert pool.memory.prefixes.index.match(blocks) == {first.worker_id: 3}
    await first.kill()
    await eventually(lambda: pool.memory.prefixes.index.match(blocks) == {})
