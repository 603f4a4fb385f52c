"""The real pair changes places and back: equal text each time, the times printed."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import msgspec
import pytest
import structlog
from redis.asyncio import Redis

from contracts.keys import worker_lease
from contracts.lifecycle import FinishReason, Phase, Role, WorkerState
from contracts.prefix import HASH_FORMAT, prompt_blocks, scope, unpack_blocks
from contracts.v1 import worker_pb2 as pb
from contracts.wire import ROLE_TO_PB, Registration, pack_ids
from tests.engines import BOOT_S, Engines, EngineWorker
from tests.workers.engine_client import LEADER_EPOCH, client_of
from tests.workers.peers import Gateway, Leader, new_attempt, pair_submits, submit_of

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(840)]

log = structlog.get_logger()

EPOCH = LEADER_EPOCH  # the engines are shared, and a lower one would be a former leader's
GREEDY = {"temperature": 0.0, "max_tokens": 32}


class Side:
    """One worker of the pair with its leader's stream."""

    def __init__(self, worker, leader: Leader) -> None:
        self.worker, self.leader = worker, leader
        self.epoch = worker.epoch
        self.bootstrap = worker.bootstrap
        self.control_ms = 0.0

    async def become(self, role: Role) -> pb.RoleResult:
        seen, asked_s = len(self.leader.of("role_result")), time.monotonic()
        await self.leader.send(set_role=pb.SetRole(role=ROLE_TO_PB[role], leader_epoch=EPOCH))
        result = await self.leader.next_of("role_result", lambda r: self.leader.of("role_result").index(r) >= seen)
        self.control_ms = (time.monotonic() - asked_s) * 1000  # from the command to its answer, as the leader sees it
        self.epoch = self.worker.epoch = result.worker_epoch
        return result


async def reference(engines: Engines) -> list[str]:
    texts, name = [], str(new_attempt().rid)  # a gateway that was here before would have to go on with its numbers
    async with asyncio.TaskGroup() as tasks:
        leader = Leader(engines.unified.address, epoch=EPOCH)
        gateway = Gateway(engines.unified.address, gateway_id=name)
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=engines.unified.epoch)
        for prompt in engines.prompts:
            attempt = new_attempt()
            submit = submit_of(engines.unified, prompt, attempt=attempt, epoch=EPOCH, gateway_id=name, **GREEDY)
            await leader.send(submit=submit)
            texts.append((await gateway.answer(attempt)).text)
        await gateway.detach()
        await leader.close()
    return texts


async def texts_of(engines: Engines, prefill: Side, decode: Side, name: str) -> list[str]:
    """The texts of all prompts through the pair as it stands."""
    texts = []
    async with asyncio.TaskGroup() as tasks:
        gateways = []
        for side in (prefill, decode):
            gateway = Gateway(side.worker.address, gateway_id=name)
            await gateway.attach(tasks, epoch=side.epoch)
            gateways.append(gateway)
        for prompt in engines.prompts:
            attempt = new_attempt()
            to_prefill, to_decode = pair_submits(
                prefill, decode, prompt, attempt, epoch=EPOCH, gateway_id=name, **GREEDY
            )
            await decode.leader.send(submit=to_decode)
            await prefill.leader.send(submit=to_prefill)
            answer = await gateways[1].answer(attempt, Phase.DECODE, within_s=60)
            assert answer.reason is FinishReason.LENGTH
            await gateways[0].answer(attempt, Phase.PREFILL, within_s=60)
            texts.append(answer.text)
        for gateway in gateways:
            await gateway.detach()
    return texts


async def test_the_real_pair_changes_places_and_back_and_says_the_same(engines):
    async with asyncio.TaskGroup() as tasks:
        sides = []
        for worker in (engines.prefill, engines.decode):
            leader = Leader(worker.address, epoch=EPOCH)
            await leader.open(tasks)
            sides.append(Side(worker, leader))
        a, b = sides
        wanted = await reference(engines)
        ports = {}
        for side, role in ((a, "prefill"), (b, "decode")):
            ports[role] = side.bootstrap
        for turn in range(2):
            to_a, to_b = (Role.DECODE, Role.PREFILL) if turn % 2 == 0 else (Role.PREFILL, Role.DECODE)
            results = await a.become(to_a), await b.become(to_b)
            log.info(
                "real_switch",
                drain_ms=[round(r.drain_ms) for r in results],
                control_ms=[
                    round(side.control_ms - r.drain_ms - r.switch_ms) for side, r in zip(sides, results, strict=True)
                ],
                switch_ms=[round(r.switch_ms) for r in results],
            )
            assert [r.ok for r in results] == [True, True], [r.message for r in results]
            prefill, decode = (b, a) if to_a is Role.DECODE else (a, b)
            prefill.bootstrap = await bootstrap_of(engines, prefill)
            assert await texts_of(engines, prefill, decode, f"turn-{turn}") == wanted
        for side in sides:
            await side.leader.close()


async def test_decode_finds_a_prefill_worker_again_that_has_been_something_else_in_between(engines):
    async with client_of(engines) as client:
        await client.pair(engines.prompts[0], **GREEDY)  # decode knows it, in the life before
        before = engines.prefill.bootstrap
    async with asyncio.TaskGroup() as tasks:
        leader = Leader(engines.prefill.address, epoch=EPOCH)
        await leader.open(tasks)
        side = Side(engines.prefill, leader)
        results = [await side.become(Role.DECODE), await side.become(Role.PREFILL)]
        engines.prefill.bootstrap = await bootstrap_of(engines, side)
        await leader.close()
    assert [result.ok for result in results] == [True, True], [result.message for result in results]
    assert engines.prefill.bootstrap != before
    async with client_of(engines) as client:
        alone = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
        pair = [(await client.pair(prompt, **GREEDY))[1] for prompt in engines.prompts]
    assert [answer.text for answer in pair] == [answer.text for answer in alone]


async def bootstrap_of(engines: Engines, side: Side) -> tuple[str, int]:
    """Wait until the lease tells of the new life, and return its bootstrap address."""
    lease = await lease_of(engines, side.worker, Role.PREFILL, lambda found: found.epoch == side.epoch, within_s=10)
    return lease.bootstrap_host, lease.bootstrap_port


async def lease_of(
    engines: Engines, worker: EngineWorker, role: Role, wanted: Callable[[Registration], bool], *, within_s: float
) -> Registration:
    """Wait until a worker's lease says that it is ready in a role, and is the wanted one."""
    redis = Redis.from_url(engines.redis_url)
    registration = worker.registration
    try:
        async with asyncio.timeout(within_s):
            while True:
                raw = await redis.get(worker_lease(registration.pool, registration.worker_id))
                lease = msgspec.msgpack.decode(raw, type=Registration) if raw else None
                if lease is not None and lease.role is role and lease.state is WorkerState.READY and wanted(lease):
                    return lease
                assert worker.process.poll() is None, worker.log.read_text()[-2000:]
                await asyncio.sleep(0.05)
    finally:
        await redis.aclose()


async def restarted(engines: Engines, worker: EngineWorker, role: Role) -> None:
    """Ask for a role that only another process of the engine can have, wait for it, and say how long it took."""
    before, asked_s = worker.epoch, time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        leader = Leader(worker.address, epoch=EPOCH)
        await leader.open(tasks)
        await leader.send(set_role=pb.SetRole(role=ROLE_TO_PB[role], leader_epoch=EPOCH))
        lease = await lease_of(engines, worker, role, lambda found: found.epoch > before, within_s=BOOT_S)
        await leader.close()
    log.info("real_restart", role=role, took_s=round(time.monotonic() - asked_s, 1))
    worker.registration, worker.epoch, worker.address = lease, lease.epoch, lease.address
    worker.bootstrap = (lease.bootstrap_host, lease.bootstrap_port)


async def test_a_worker_of_the_real_pair_starts_again_as_unified_and_comes_back(engines):
    """Under the direct hand-off no call of SGLang leads to or from unified: the process starts again in its place."""
    wanted, pid = await reference(engines), engines.decode.process.pid
    await restarted(engines, engines.decode, Role.UNIFIED)
    assert (engines.decode.process.poll(), engines.decode.registration.pid) == (None, pid)
    async with asyncio.TaskGroup() as tasks:
        leader = Leader(engines.decode.address, epoch=EPOCH)
        gateway = Gateway(engines.decode.address, gateway_id="alone")
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=engines.decode.epoch)
        texts = []
        for prompt in engines.prompts:
            attempt = new_attempt()
            submit = submit_of(engines.decode, prompt, attempt=attempt, epoch=EPOCH, gateway_id="alone", **GREEDY)
            await leader.send(submit=submit)
            texts.append((await gateway.answer(attempt, within_s=60)).text)
        await gateway.detach()
        await leader.close()
    assert texts == wanted
    await restarted(engines, engines.decode, Role.DECODE)
    async with asyncio.TaskGroup() as tasks:
        sides = [Side(worker, Leader(worker.address, epoch=EPOCH)) for worker in (engines.prefill, engines.decode)]
        for side in sides:
            await side.leader.open(tasks)
        assert await texts_of(engines, *sides, "back") == wanted
        for side in sides:
            await side.leader.close()


async def test_a_role_changes_once_the_peer_of_an_aborted_hand_off_has_let_go_of_it(engines):
    """SGLang keeps what an aborted hand-off was to fill until its peer says that it writes there no more."""
    prompts = [[100 + number + 7 * i % 1000 for i in range(1500)] for number in range(4)]
    async with client_of(engines) as client:
        leader, gateway = client.leaders["decode"], client.gateways["decode"]
        attempts = [await client.submit_pair(prompt, **GREEDY) for prompt in prompts]
        await leader.next_of("status", lambda status: status.num_decode_transfer >= 2)
        os.killpg(engines.prefill.process.pid, signal.SIGSTOP)
        try:
            for attempt in attempts:
                await gateway.abort(attempt)
            reasons = {(await gateway.answer(attempt, Phase.DECODE, within_s=30)).reason for attempt in attempts}
            seen = len(leader.of("status"))
            await leader.send(set_role=pb.SetRole(role=pb.ROLE_PREFILL, leader_epoch=EPOCH))
            drains = {pb.WORKER_STATE_DRAINING, pb.WORKER_STATE_SWITCHING}
            await leader.until(lambda: sum(s.state in drains for s in leader.of("status")[seen:]) >= 10)
            early = leader.of("role_result")
        finally:
            os.killpg(engines.prefill.process.pid, signal.SIGCONT)
        assert early == []
        assert FinishReason.ABORTED in reasons
        there = await leader.next_of("role_result", lambda _: True)
        await leader.send(set_role=pb.SetRole(role=pb.ROLE_DECODE, leader_epoch=EPOCH))
        back = await leader.next_of("role_result", lambda result: result.role == pb.ROLE_DECODE)
        log.info("waited_for_its_peer", drain_ms=round(there.drain_ms), switch_ms=round(there.switch_ms))
        assert (there.ok, there.message, back.ok) == (True, "", True)
        engines.decode.epoch = back.worker_epoch
        for attempt in attempts:
            await client.gateways["prefill"].abort(attempt)
            await client.gateways["prefill"].answer(attempt, Phase.PREFILL, within_s=60)
    async with client_of(engines) as client:
        for role in ("prefill", "decode"):
            await client.idle(role)
        alone = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
        pair = [await client.pair(prompt, **GREEDY) for prompt in engines.prompts]
    assert [decode.text for _, decode in pair] == [answer.text for answer in alone]


async def test_the_real_engine_tells_the_blocks_that_a_gateway_computes(engines):
    """The worker makes the chain from SGLang's own events; the same prompt and salt give the same names here."""
    prompt = engines.prompts[4] * 3
    wanted = prompt_blocks(
        pack_ids(prompt), scope(model_revision=engines.unified.registration.model_revision, salt="tenant-a")
    )
    assert len(wanted) >= 2
    assert engines.unified.registration.hash_format == HASH_FORMAT
    async with asyncio.TaskGroup() as tasks:
        leader = Leader(engines.unified.address, epoch=EPOCH)
        gateway = Gateway(engines.unified.address, gateway_id="blocks")
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=engines.unified.epoch)
        attempt = new_attempt()
        fields = {"attempt": attempt, "epoch": EPOCH, "gateway_id": "blocks", "cache_salt": "tenant-a", **GREEDY}
        submit = submit_of(engines.unified, prompt, **fields)
        await leader.send(submit=submit)
        await gateway.answer(attempt)
        await leader.next_of("kv_events", lambda _: set(wanted) <= held(leader))
        other = prompt_blocks(
            pack_ids(prompt), scope(model_revision=engines.unified.registration.model_revision, salt="tenant-b")
        )
        assert not set(other) & held(leader)
        before = held(leader)
        await leader.send(kv_resync=pb.KvResync())
        seen = len(leader.of("kv_events"))
        await leader.next_of("kv_events", lambda e: leader.of("kv_events").index(e) >= seen and e.cleared)
        await leader.next_of("kv_events", lambda _: held(leader) >= before)
        await gateway.detach()
        await leader.close()


def held(leader: Leader) -> set[int]:
    """What a scheduler believes the worker holds on its device."""
    names: set[int] = set()
    for events in leader.of("kv_events"):
        if events.cleared:
            names.clear()
        names |= set(unpack_blocks(events.stored))
        names -= set(unpack_blocks(events.removed))
    return names
