"""Redis going away, gateways dying or stopping: what ended is settled in the end, once."""

import asyncio
import signal
from pathlib import Path

import httpx
import msgspec
import pytest
from gateway_rig import HELLO, POOL, PeerWorker, Rig, events_of, eventually, running_rig, silent_records
from redis.asyncio import Redis

from contracts import keys
from contracts.catalog import Catalog
from contracts.lifecycle import FinishReason, Phase, Role
from contracts.rating import Price, Tokens
from contracts.resp import RespConnection
from contracts.settlement import Reservation, Reserved, SettlementScripts, encode_owner
from contracts.slo import SloTarget
from contracts.units import Nano, NanoPerMillion
from contracts.usage import Outcome, UsageEvent
from contracts.wire import Abort, Owner
from gateway.journal import Journal
from gateway.settlement import Settlement
from gateway.terms import Closed
from pdgate.services import start_valkey
from tests.processes import Stack

RID = "01a229bd-76e1-7cb4-8f6f-64bf51d2c09d"
PRICE = Price(
    version=1,
    model="tiny",
    prefill_computed=NanoPerMillion(100_000_000),
    prefill_cached=NanoPerMillion(20_000_000),
    decode=NanoPerMillion(400_000_000),
)
OWNER = Owner(org="org_1", project="proj_1", key_id="key_1", model="tiny", tier="default", price=PRICE, slo=SloTarget())


def closed(rid: str = RID, *, decode: int = 2) -> Closed:
    event = UsageEvent(
        rid=rid,
        org="org_1",
        project="proj_1",
        key_id="key_1",
        model="tiny",
        pool=POOL,
        tier="default",
        outcome=Outcome.FINISHED,
        tokens=Tokens(prefill_computed=3, decode=decode),
        price=PRICE,
        cost=Nano(300 + decode * 400),
    )
    return Closed(event=event, entry_id="", ended_unix_ms=1)


def journals_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.journal"))


async def reserve(redis: Redis) -> None:
    await redis.hset(keys.key_states("org_1"), "key_1", "active:1")
    reservation = Reservation(
        rid=RID,
        member=f"org_1/{RID}",
        now_ms=1,
        deadline_ms=2,
        key_id="key_1",
        key_state="active:1",
        owner=encode_owner(OWNER),
        pool=POOL,
    )
    assert isinstance(await SettlementScripts(redis).reserve("org_1", reservation), Reserved)


def test_a_journal_gives_back_whole_records_and_ignores_a_torn_one(tmp_path: Path):
    dead = Journal(tmp_path, "dead", max_bytes=10_000)
    dead.open()
    first, second = closed(), closed("01a229bd-76e1-7cb4-8f6f-64bf51d2c09e")
    assert dead.append(first)
    assert dead.append(second)
    dead.close()
    path = tmp_path / "settlements-dead.journal"
    path.write_bytes(path.read_bytes()[:-3])
    heir = Journal(tmp_path, "heir", max_bytes=10_000)
    assert heir.open() == [first]
    assert not path.exists()
    assert heir.read() == [first]
    heir.clear()
    heir.close()
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_read_is_left_out(tmp_path: Path):
    (tmp_path / "settlements-dead.journal").write_bytes(b"\x03\x00\x00\x00abc")
    dead = Journal(tmp_path, "other", max_bytes=10_000)
    dead.open()
    dead.append(closed())
    dead.close()
    heir = Journal(tmp_path, "heir", max_bytes=10_000)
    assert heir.open() == [closed()]


def test_the_journal_of_a_gateway_that_lives_is_left_alone(tmp_path: Path):
    living = Journal(tmp_path, "living", max_bytes=10_000)
    living.open()
    living.append(closed())
    other = Journal(tmp_path, "other", max_bytes=10_000)
    assert other.open() == []
    assert living.read() == [closed()]


def test_a_full_journal_refuses_and_counts(tmp_path: Path):
    journal = Journal(tmp_path, "small", max_bytes=600)
    journal.open()
    taken = sum(journal.append(closed()) for _ in range(10))
    assert 0 < taken < 10
    assert journal.num_dropped == 10 - taken
    assert len(journal.read()) == taken


async def test_what_a_dead_gateway_left_in_its_journal_is_settled_by_the_next(
    redis: Redis, redis_url: str, tmp_path: Path
):
    await reserve(redis)
    dead = Journal(tmp_path, "dead", max_bytes=10_000)
    dead.open()
    dead.append(closed())
    dead.close()
    journal = Journal(tmp_path, "heir", max_bytes=10_000)
    records = silent_records()
    settlement = Settlement(RespConnection(redis_url), journal, records, max_waiting=10)
    settlement.recover()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(settlement.run())
        await settlement.drain(10)
        running.cancel()
    settlement.close()
    raw = await redis.get(keys.settled_request("org_1", RID))
    assert msgspec.msgpack.decode(raw, type=UsageEvent) == closed().event
    assert await redis.exists(keys.reservation("org_1", RID)) == 0
    assert journals_in(tmp_path) == []


async def test_a_settlement_that_redis_refuses_holds_up_no_other(redis: Redis, redis_url: str, tmp_path: Path):
    await reserve(redis)
    broken = "01a229bd-76e1-7cb4-8f6f-000000000000"
    await redis.hset(keys.reservation("org_1", broken), "no", "string")
    journal = Journal(tmp_path, "gateway", max_bytes=10_000)
    settlement = Settlement(RespConnection(redis_url), journal, silent_records(), max_waiting=10)
    settlement.recover()
    settlement.offer(closed(broken))
    settlement.offer(closed())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(settlement.run())
        await settlement.drain(5)
        running.cancel()
    assert settlement.num_waiting == 0
    assert await redis.get(keys.settled_request("org_1", RID)) is not None


async def test_more_than_fits_in_memory_is_settled_from_the_journal(redis: Redis, redis_url: str, tmp_path: Path):
    journal = Journal(tmp_path, "gateway", max_bytes=100_000)
    records = silent_records()
    settlement = Settlement(RespConnection(redis_url), journal, records, max_waiting=2)
    settlement.recover()
    await reserve(redis)
    others = [f"01a229bd-76e1-7cb4-8f6f-{i:012x}" for i in range(3)]
    for rid in (*others, RID):
        settlement.offer(closed(rid))
    assert journal.num_records > 0
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(settlement.run())
        await settlement.drain(10)
        running.cancel()
    assert await redis.get(keys.settled_request("org_1", RID)) is not None
    assert journal.num_records == 0


@pytest.fixture
async def own_valkey(service_folder: Path):
    """A Valkey of this test alone, which the test may stop and start again on the same data."""
    folder = service_folder / "outage"
    service = await asyncio.to_thread(start_valkey, folder)
    running = [service]

    async def restart() -> None:
        running.append(await asyncio.to_thread(start_valkey, folder))

    yield service, restart
    await asyncio.to_thread(running[-1].stop)


async def test_running_streams_survive_an_outage_of_redis_and_are_settled_after_it(
    own_valkey, database_url: str, catalog_file: Path, catalog: Catalog, models_dir: Path, tmp_path: Path
):
    service, restart = own_valkey
    async with running_rig(
        redis_url=service.url,
        database_url=database_url,
        catalog_file=catalog_file,
        catalog=catalog,
        models_dir=models_dir,
        journal_dir=tmp_path,
    ) as rig:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(rig.client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
            submit = await rig.scheduler.submit()
            await rig.scheduler.placed(submit, decode=rig.decode)
            decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
            await decode.tokens("still ")
            await eventually(lambda: rig.gateway.table.find(submit.rid).placed)
            await asyncio.to_thread(service.stop)
            refused = await rig.client.post("/v1/chat/completions", json=HELLO)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            await decode.tokens("here")
            await decode.finish(FinishReason.STOP, prompt=5, completion=2)
        events = events_of(asked.result().text)
        assert events[-1] == "[DONE]"
        (journal,) = journals_in(tmp_path)
        await eventually(lambda: journal.stat().st_size > 0)
        await eventually(lambda: not rig.gateway.fleet.redis_up)
        assert (await rig.client.get("/readyz")).status_code == 503
        assert (await rig.client.get("/readyz?every_model=false")).status_code == 503
        await restart()
        event = await rig.usage(submit.rid)
        assert (event.outcome, event.tokens.decode) == (Outcome.FINISHED, 2)
        await eventually(lambda: journal.stat().st_size == 0)
        # Whether the refused one was written is not known, so the scheduler is told.
        assert isinstance(await rig.scheduler.next(), Abort)
        await rig.redis.xtrim(keys.inbox(POOL), maxlen=0)
        assert await eventually(rig.nothing_queued_or_reserved)


async def test_sigterm_breaks_off_streams_settles_them_and_exits(
    redis: Redis, redis_url: str, database_url: str, catalog_file: Path, models_dir: Path, tmp_path: Path
):
    stack = Stack(
        folder=tmp_path,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed()
    worker = PeerWorker("unified-0", Role.UNIFIED)
    await worker.start()
    await redis.zadd(keys.pool_workers(POOL), {worker.worker_id: 9e15})
    lease = keys.worker_lease(POOL, worker.worker_id)
    await redis.set(lease, msgspec.msgpack.encode(worker.registration()))
    stack.add_gateway()
    stack.start()
    try:
        await stack.ready(30)
        headers = {"authorization": f"Bearer {stack.api_key}"}
        async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=20) as client:
            rig = Rig(None, redis, None, client)
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
                submit = await rig.scheduler.submit()
                await rig.scheduler.placed(submit, decode=worker)
                decode = await worker.open(submit.rid, Phase.UNIFIED)
                seq = await decode.tokens("cut")
                await eventually(lambda: seq)
                await eventually(lambda: redis.exists(keys.gateway_lease(submit.gateway_id)))
                async with client.stream("GET", "/livez"):
                    pass
                _, half = await asyncio.open_connection("127.0.0.1", stack.gateway_port)
                half.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x")
                stack.processes["gateway"].send_signal(signal.SIGTERM)
                await eventually(lambda: worker.aborts)
                await decode.finish(FinishReason.ABORTED, prompt=5, completion=1)
        events = events_of(asked.result().text)
        assert events[-1]["error"]["code"] == "interrupted"
        # Whoever has sent half a request is not waited for.
        assert await asyncio.to_thread(stack.processes["gateway"].wait, 5) == 0
        half.close()
        raw = await redis.get(keys.settled_request(stack.org, submit.rid))
        event = msgspec.msgpack.decode(raw, type=UsageEvent)
        assert (event.outcome, event.cause, event.cost) == (Outcome.INTERRUPTED, "gateway_stopped", 0)
        assert event.tokens.decode == 1
        assert await redis.exists(keys.gateway_lease(submit.gateway_id)) == 0
        assert await redis.exists(keys.reservation(stack.org, submit.rid)) == 0
    finally:
        stack.stop()
        await worker.stop()


async def test_bad_settings_stop_the_process_with_one_clear_line(tmp_path: Path, catalog_file: Path, models_dir: Path):
    stack = Stack(
        folder=tmp_path,
        redis_url="unix:///nowhere",
        database_url="mysql://x",
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    stack.add_gateway()
    stack.start()
    assert await asyncio.to_thread(stack.processes["gateway"].wait, 20) == 1
    assert stack.log("gateway").strip().splitlines()[-1] == "DATABASE_URL must start with postgresql://, not mysql://"
