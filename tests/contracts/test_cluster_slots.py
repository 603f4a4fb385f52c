"""Redis Cluster: every script and every command with several keys names keys of one slot, on three real nodes."""

import ast
import re
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError
from valkey_cluster import SLOTS, valkey_cluster

from billing.budgets import Budgets, Held
from billing.consumer import usage_streams
from billing.dead_letters import DeadLetters
from billing.streams import GroupReader
from contracts import keys
from contracts.identity import NUM_SHARDS, new_rid
from contracts.lifecycle import HandOff, Role, WorkerState
from contracts.lifecycle import Path as RequestPath
from contracts.orders import answer as order_answer
from contracts.orders import orders
from contracts.rating import Price
from contracts.settlement import (
    METER_PROMPT,
    Budget,
    Lease,
    Rate,
    Reservation,
    Reserved,
    SettlementScripts,
    Unreserved,
    encode_owner,
)
from contracts.slo import SloTarget
from contracts.units import Nano, NanoPerMillion
from contracts.usage import Outcome, Tokens, UsageEvent
from contracts.wire import FIELD, Owner, Registration, WorkerRef
from gateway.idempotency import Idempotency
from gateway.lease import Lease as GatewayLease
from gateway.live_answers import LiveAnswers
from gateway.portal.passwords import Tries
from gateway.portal.sessions import Sessions
from gateway.tenants import publish_key_state
from scheduler.leader import LeaderLease
from scheduler.record import Placed, WriteAhead
from scheduler.shares import Shares
from tests.processes import REPOSITORY
from workers.heartbeat import Heartbeat

NOW_MS = 1_900_000_000_000
ORGS = [f"org_{number}" for number in range(24)]
POOLS = [f"pool-{number}" for number in range(24)]
"""So many that each node has some: a script that reached for another node's key would be refused."""


SLO = SloTarget(ttft_ms=2000)
PRICE = Price(
    model="tiny",
    version=1,
    prefill_computed=NanoPerMillion(100_000_000),
    prefill_cached=NanoPerMillion(20_000_000),
    decode=NanoPerMillion(400_000_000),
)


class OverCluster:
    """What a RespConnection is to its callers, over a client that knows the cluster."""

    def __init__(self, cluster: RedisCluster) -> None:
        self._cluster = cluster

    async def call(self, *command: Any) -> Any:
        return await self._cluster.execute_command(*command)

    async def call_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        return [await self.call(*command) for command in commands]

    def register_script(self, text: str):
        return self._cluster.register_script(text)


@pytest.fixture(scope="module")
def ports():
    with tempfile.TemporaryDirectory(prefix="pdgate-cluster-") as folder, valkey_cluster(Path(folder)) as ports:
        yield ports


@pytest.fixture
async def cluster(ports):
    client = RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", port) for port in ports])
    await client.initialize()
    yield client
    await client.flushall(target_nodes=RedisCluster.PRIMARIES)
    await client.aclose()


def nodes_of(names: Sequence[str]) -> set[int]:
    return {key_slot(name.encode()) * 3 // SLOTS for name in names}


async def test_the_cluster_refuses_what_is_looked_for_here(cluster):
    """Otherwise the tests below would show nothing."""
    assert nodes_of([keys.key_states(org) for org in ORGS]) == {0, 1, 2}
    assert nodes_of([keys.leader(pool) for pool in POOLS]) == {0, 1, 2}
    two_slots = ["pdgate:{s01}:a", "pdgate:{s02}:b"]
    with pytest.raises(RedisClusterException, match="slot"):
        await cluster.eval("return redis.call('GET', KEYS[2])", 2, *two_slots)
    refused = 0
    for shard in range(NUM_SHARDS):  # a key that is not declared, of another tag: refused by the node that runs it
        try:
            await cluster.eval("return redis.call('GET', ARGV[1])", 1, keys.usage_stream(shard), "pdgate:{s01}:x")
        except RedisError:
            refused += 1
    assert refused > NUM_SHARDS // 3


def reservation(org: str, rid: str) -> Reservation:
    owner = Owner(
        org=org, project="p", key_id="k", model="tiny", tier="default", price=PRICE, slo=SloTarget(ttft_ms=2000)
    )
    scopes = (("org", org), ("project", "p"), ("key", "k"), ("credit", org))
    return Reservation(
        rid=rid,
        member=f"{org}/{rid}",
        now_ms=NOW_MS,
        deadline_ms=NOW_MS + 60_000,
        key_id="k",
        key_state="active:1",
        owner=encode_owner(owner),
        pool="tiny",
        rates=[Rate(key=keys.rate_bucket(org, "key", "k", METER_PROMPT), meter=METER_PROMPT, limit=100, amount=10)],
        leases=[Lease(key=keys.concurrency_leases(org, scope, name), limit=9) for scope, name in scopes[:3]],
        budgets=[Budget(key=keys.budget(org, scope, name), limit=10**9, amount=1000) for scope, name in scopes],
    )


def usage_event(org: str, rid: str) -> UsageEvent:
    return UsageEvent(
        rid=rid,
        org=org,
        project="p",
        key_id="k",
        model="tiny",
        pool="tiny",
        tier="default",
        outcome=Outcome.FINISHED,
        tokens=Tokens(prefill_computed=5, decode=2),
        price=PRICE,
        cost=Nano(700),
    )


async def test_all_that_limits_and_charges_an_organisation_is_in_its_slot(cluster):
    scripts = SettlementScripts(cluster)
    budgets = Budgets(None, cluster)
    for org in ORGS:
        key = SimpleNamespace(id="k", organisation_id=org, state="active", version=1)
        await publish_key_state(cluster, key)
        rid = new_rid(NOW_MS)
        assert isinstance(await scripts.reserve(org, reservation(org, rid)), Reserved)
        assert await scripts.extend(org, rid, 500) is None
        await scripts.found_cached(org, rid, 3)
        assert await scripts.settle(usage_event(org, rid), {METER_PROMPT: 5})
        later = new_rid(NOW_MS)
        unreserved = Unreserved(rates=reservation(org, later).rates, budgets=reservation(org, later).budgets)
        assert await scripts.settle(usage_event(org, later), {METER_PROMPT: 5}, unreserved=unreserved)
        held = Held(organisation=org, scope="org", scope_id=org, limit=10**9, period=None)
        assert await budgets._write(held, limit="1000000", delta=0) == 1400
        assert await cluster.hgetall(keys.budget(org, "credit", org))
    waiting = [await cluster.xlen(keys.usage_stream(shard)) for shard in range(NUM_SHARDS)]
    assert sum(waiting) == 2 * len(ORGS)


async def test_billing_reads_the_usage_of_all_shards_and_moves_what_it_cannot_read(cluster):
    streams = usage_streams()
    reader = GroupReader(cluster, group="billing", consumer="a", streams=streams)
    await reader.create_groups()
    for stream in streams:
        await cluster.xadd(stream, {FIELD: b"1"})
    entries = []
    while len(entries) < NUM_SHARDS:
        entries += await reader.read(count=10, block_ms=1000)
    assert {entry.stream for entry in entries} == set(streams)
    assert await reader.read(count=10, block_ms=0) == []
    other = GroupReader(cluster, group="billing", consumer="b", streams=streams)
    assert len(await other.claim(idle_ms=0, count=10)) == NUM_SHARDS
    for entry in entries[::2]:
        assert await reader.bury(entry, "why")
    await reader.acknowledge(entries[1::2])
    assert await reader.backlog() == (0, NUM_SHARDS // 2)
    letters = DeadLetters(cluster, POOLS)
    assert await letters.redrive(await letters.list()) == NUM_SHARDS // 2
    assert await reader.backlog() == (NUM_SHARDS // 2, 0)


def registration(pool: str, worker_id: str) -> Registration:
    return Registration(
        worker_id=worker_id, epoch=1, pid=1, address="h:1", pool=pool, role=Role.DECODE, state=WorkerState.READY,
        engine="timed", simulated=True, model_path="m", model_revision="r", dtype="", kv_dtype="", page_size=1,
        tp_size=1, dp_size=1, transfer_backend="", bootstrap_host="", bootstrap_port=0, kv_capacity_tokens=1,
        max_running=1, context_tokens=1, hand_offs=(HandOff.DIRECT,), catalog_revision="c", started_unix_ms=1,
    )  # fmt: skip


async def test_all_that_places_a_pools_requests_is_in_its_slot(cluster):
    connection = OverCluster(cluster)
    for pool in POOLS:
        lease = LeaderLease(cluster, pool, "s-1")
        assert await lease.acquire(lambda: 7) == 8
        assert await lease._renew(keys=[keys.leader(pool)], args=[lease.value, 1500])
        requests = [request(pool) for _ in range(3)]
        record = WriteAhead(connection, pool, lease)
        assert await record.write([Placed(one, 0) for one in requests]) == [0, 0, 0]
        records = await cluster.mget([keys.inflight(pool, one.rid) for one in requests])  # a new leader's look
        assert None not in records
        beats = [Heartbeat(cluster, lambda pool=pool, n=n: registration(pool, f"w-{n}")) for n in range(2)]
        for beat in beats:
            await beat._write()
        assert None not in await cluster.mget([keys.worker_lease(pool, f"w-{n}") for n in range(2)])
        await beats[0].remove()
        assert await cluster.zcard(keys.pool_workers(pool)) == 1
        await Shares(cluster, pool, "s-1")._beat(keys.schedulers(pool))
        await cluster.rpush(order_answer(pool, "o"), b"done")
        assert await cluster.blpop([order_answer(pool, "o")], timeout=5)
        await cluster.xadd(orders(pool), {FIELD: b"o"})
        assert await cluster.xread({orders(pool): "0-0"}, count=10)
        await cluster.xadd(keys.outcomes(pool), {FIELD: b"o"})
        assert await cluster.xread({keys.outcomes(pool): "0-0"}, count=10)


def request(pool: str):
    return SimpleNamespace(
        rid=new_rid(NOW_MS), path=RequestPath.PD, hand_off_now=HandOff.DIRECT, entry_id=b"1-1", attempt=1, rooms=(1,),
        decode_ref=WorkerRef(worker_id="d", epoch=1, address="h:1"), prefill_ref=None, delivered=(), done=(),
        submit=SimpleNamespace(deadline_unix_ms=NOW_MS),
    )  # fmt: skip


async def test_gateways_and_browsers_have_slots_of_their_own(cluster):
    for _ in range(8):
        lease = GatewayLease(OverCluster(cluster), gateway_id=str(uuid.uuid4()), address="h:1")
        await lease.renew()
        await lease.release()
    sessions = Sessions(cluster)
    first = await sessions.begin("person", how="password")
    second = await sessions.begin("person", how="password", replaces=first)
    await sessions.end(second, await sessions.find(second))
    await sessions.begin("person", how="link")
    assert await sessions.end_all("person") >= 1
    tries = Tries(cluster)
    await tries.count("a@b", "192.0.2.1")
    await tries.forget("a@b", "192.0.2.1")
    for org in ORGS:
        live = LiveAnswers(OverCluster(cluster))
        once = Idempotency(
            None, auth=None, connection=OverCluster(cluster), live=live, gateway_id="g", max_body_bytes=1,
            body_timeout_s=1, timeout_s=1,
        )  # fmt: skip
        place = keys.idempotent(org, f"name-of-{org}")
        assert await once._claim(place, b"claim", b"") is None
        assert await once._end(keys=[place], args=[b"claim", b"value", 1000])
        making = live.begin(f"{place}:live", max_bytes=10)
        making.head(200, [])
        making.body(b"answer")
        await live.end(making)
        assert await cluster.xlen(making.key) == 1


# -- nothing forgotten -----------------------------------------------------------------------------------------------

PACKAGES = ("billing", "contracts", "gateway", "observability", "pdgate", "scheduler", "workers")
SHOWN = {
    "billing/budgets.py": {"register_script"},
    "billing/dead_letters.py": {"register_script"},
    "billing/streams.py": {"register_script", "xreadgroup"},
    "contracts/settlement.py": {"register_script"},
    "gateway/changes.py": {"xread"},  # one stream, as in notices, inbox and outcomes
    "gateway/fleet.py": {"mget"},  # the leases of one pool's workers
    "gateway/idempotency.py": {"register_script"},
    "gateway/notices.py": {"xread"},
    "gateway/portal/passwords.py": {"delete", "transaction"},
    "gateway/portal/sessions.py": {"delete", "transaction"},
    "gateway/settlement.py": {"del"},  # the records of one pool
    "gateway/tenants.py": {"eval"},
    "pdgate/worker_commands.py": {"blpop"},
    "scheduler/inbox.py": {"xreadgroup"},
    "scheduler/leader.py": {"register_script"},
    "scheduler/orders.py": {"xread"},
    "scheduler/outcomes.py": {"xread"},
    "scheduler/record.py": {"Script"},
    "scheduler/registry.py": {"mget"},  # as gateway/fleet.py
    "scheduler/takeover.py": {"mget"},  # the records of one pool
    "workers/heartbeat.py": {"register_script"},
}
"""What the tests above run. Who adds a call here has shown on the cluster that its keys are in one slot."""

ALWAYS = {"register_script", "Script", "eval", "evalsha", "mget", "mset", "xread", "xreadgroup", "blpop", "brpop",
          "rename", "lmove", "sinter", "sunion", "zunion", "zinter", "copy_key", "watch"}  # fmt: skip
WITH_MORE = {"del", "delete", "unlink", "exists", "touch"}


def has_more(keys: Sequence[ast.expr]) -> bool:
    return len(keys) > 1 or any(isinstance(one, ast.Starred) for one in keys)


def written_out(node: ast.AST) -> tuple[str, Sequence[ast.expr]] | None:
    """Return name and arguments of a command as a RespConnection takes it: call("GET", key) or ("GET", key)."""
    match node:
        case ast.Call(func=ast.Attribute(attr="call"), args=[ast.Constant(value=str(name)), *keys]):
            return name.lower(), keys
        case ast.Tuple(elts=[ast.Constant(value=str(name)), *keys]) if name.isupper():
            return name.lower(), keys
    return None


def calls_with_several_keys(file: Path) -> set[str]:
    text, found = file.read_text(), set()
    if not any(word in text for word in ("redis", "RespConnection", "Pipeline")):
        return found
    for node in ast.walk(ast.parse(text)):
        if (command := written_out(node)) is not None:
            name, keys = command
            if name in ALWAYS or (name in WITH_MORE and has_more(keys)):
                found.add(name)
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if isinstance(node.func, ast.Attribute) and not re.search(r"redis|pipe|connection", ast.unparse(node.func)):
            continue
        if name in ALWAYS or (name in WITH_MORE and has_more(node.args)):
            found.add(name)
        elif name == "pipeline":
            known = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            if known.get("transaction", True) is not False:
                found.add("transaction")
    return found


def test_every_script_and_every_command_with_several_keys_is_among_those_shown():
    found = {}
    for package in PACKAGES:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            if calls := calls_with_several_keys(file):
                found[str(file.relative_to(REPOSITORY))] = calls
    found.pop("contracts/resp.py")  # defines Script
    assert found == SHOWN
