"""What the words of the fault plan do: each is a context that a fault is in force in, and undone at its end."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import asyncpg
import httpx
import psutil

from benches.chaos.plan import POSTGRES, VALKEY, Fault
from benches.chaos.relay import Relay
from benches.chaos.site import GATEWAYS, POOL, PROCESSES, WORKERS, Site
from contracts import keys
from contracts.resp import redis_client
from contracts.steering import Steering, encode_steering
from pdgate.services import start_valkey
from tests.processes import free_port, until

FLAP_S = 0.15
_END_S = 60.0
_REPLICA_S = 10.0

Action = Callable[[Site, Fault, Sequence[str]], AbstractAsyncContextManager[None]]


def needs(fault: Fault, site: Site) -> str:
    """Return why this machine cannot do a fault; empty = it can."""
    between_ours = fault.group == "link" and fault.on[1] not in (VALKEY, POSTGRES)
    lacking = {"clock": fault.group == "clock", "disk": fault.group == "disk", "network": between_ours,
               "upgrade": fault.group == "upgrade"}  # fmt: skip
    return next((site.lacks[what] for what, wanted in lacking.items() if wanted and what in site.lacks), "")


@asynccontextmanager
async def kill(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """SIGKILL; the service manager starts it again."""
    del fault
    before = [site.process(name) for name in names]
    for name in names:
        site.signal(name, signal.SIGKILL)
    await until(lambda: all(site.process(n) is not b for n, b in zip(names, before, strict=True)), _END_S)
    yield


@asynccontextmanager
async def freeze(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """SIGSTOP, and SIGCONT later."""
    del fault
    for name in names:
        site.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            site.signal(name, signal.SIGCONT)


@asynccontextmanager
async def restart(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """End it as a deployment does, and start it again."""
    del fault
    for name in names:
        before = site.process(name)
        await ended(site, name)
        await until(lambda name=name, before=before: site.process(name) is not before, _END_S)
    yield


async def ended(site: Site, name: str) -> None:
    """Send a process its stop signal and wait until it has ended; the service manager goes on from there."""
    process = site.process(name)
    site.signal(name, site.servers.running[name].stop_signal if name in site.servers.running else signal.SIGTERM)
    await until(lambda: process.poll() is not None, _END_S)


@asynccontextmanager
async def memory_ends(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Give a process no byte more than it has: allocations fail in it, and it ends however it ends."""
    del fault
    processes = [psutil.Process(site.process(name).pid) for name in names]
    before = [process.rlimit(psutil.RLIMIT_AS) for process in processes]
    for process in processes:
        used = process.memory_info().vms
        process.rlimit(psutil.RLIMIT_AS, (used, before[0][1]))
    try:
        yield
    finally:
        for process, limits in zip(processes, before, strict=True):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.rlimit(psutil.RLIMIT_AS, limits)


def relays_of(site: Site, names: Sequence[str]) -> list[Relay]:
    """Return the relays between processes and a server; `all` = of every process."""
    caller, server = names
    return [relay for (who, where), relay in site.relays.items() if where == server and caller in (who, "all")]


@asynccontextmanager
async def cut(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Let nothing pass between two, silently."""
    del fault
    one, other = names
    if other in (VALKEY, POSTGRES):
        relays = relays_of(site, names)
        for relay in relays:
            relay.cut()
        try:
            yield
        finally:
            for relay in relays:
                relay.heal()
        return
    assert site.net is not None
    site.net.cut(one, other)
    try:
        yield
    finally:
        site.net.heal(one, other)


@asynccontextmanager
async def flap(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Cut a link every other 150 ms: packets are lost and sent again, so that it is slow, and never quite gone."""
    del fault
    assert site.net is not None
    one, other = names
    net, stopping = site.net, asyncio.Event()

    async def flapping() -> None:
        while not stopping.is_set():
            net.cut(one, other)
            await asyncio.sleep(FLAP_S)
            net.heal(one, other)
            await asyncio.sleep(FLAP_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(flapping())
        try:
            yield
        finally:
            stopping.set()


@asynccontextmanager
async def slow(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Delay what passes between processes and a server, each way."""
    relays = relays_of(site, names)
    for relay in relays:
        relay.delay_s = fault.amount
    try:
        yield
    finally:
        for relay in relays:
            relay.delay_s = 0.0


@asynccontextmanager
async def fail_over(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Promote a replica that has everything, and end the old master. (One that lags loses money: billing's own row.)"""
    del fault, names
    servers = site.servers
    old = servers.running[VALKEY]
    master_port = free_port()
    await site.redis.config_set("port", master_port)
    replica = await asyncio.to_thread(start_valkey, servers.valkey_folder(servers.valkey_number + 1))
    new = redis_client(replica.url)
    try:
        await new.execute_command("REPLICAOF", "127.0.0.1", master_port)

        async def level() -> bool:
            state = await new.info("replication")
            return state.get("master_link_status") == "up"

        await until(level, _REPLICA_S)
        await site.redis.execute_command("CLIENT", "PAUSE", 5000, "WRITE")
        offset = (await site.redis.info("replication"))["master_repl_offset"]

        async def has_all() -> bool:
            return bool((await new.info("replication"))["slave_repl_offset"] >= offset)

        await until(has_all, _REPLICA_S, every_s=0.01)
        await new.execute_command("REPLICAOF", "NO", "ONE")
    finally:
        await new.aclose()
    servers.valkey_number += 1
    servers.running[VALKEY] = replica
    await site.reconnect()
    for (_, server), relay in site.relays.items():
        if server == VALKEY:
            relay.path = servers.socket_of(VALKEY)
            relay.drop()
    old.stop()
    yield


@asynccontextmanager
async def memory_full(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Let Valkey refuse writes for want of memory."""
    del fault, names
    await site.redis.config_set("maxmemory", 1_000_000)
    try:
        yield
    finally:
        await site.redis.config_set("maxmemory", 0)


@asynccontextmanager
async def lock_tables(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Hold the locks that a careless migration would hold."""
    del fault, names
    connection = await asyncpg.connect(site.servers.running[POSTGRES].url)
    try:
        async with connection.transaction():
            await connection.execute(
                "LOCK TABLE billing.request, billing.ledger_entry, tenancy.api_key IN ACCESS EXCLUSIVE MODE"
            )
            yield
    finally:
        await connection.close()


@asynccontextmanager
async def disk_full(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Leave no byte on a disk."""
    del fault
    for name in names:
        site.disks.fill(name)
    try:
        yield
    finally:
        for name in names:
            site.disks.empty(name)


async def prepare(site: Site, fault: Fault | None) -> None:
    """Give the processes whose clock will jump a clock of their own, before any call; others have the machine's."""
    wanted = set(fault.on) if fault is not None and fault.group == "clock" else set()
    for name in site.clocks.names ^ wanted:
        if name in wanted:
            site.clocks.give(name)
        else:
            site.clocks.take(name)
        await rolled(site, name)


@asynccontextmanager
async def jump(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Set a process's wall clock by some seconds, and back."""
    for name in names:
        site.clocks.set(name, fault.amount)
    try:
        yield
    finally:
        for name in names:
            site.clocks.set(name, 0)


@asynccontextmanager
async def engine(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Switch a fault of the engine on that `do` names; its process and its port go on."""
    for name in names:
        site.fault_file(name).write_text(fault.do)
    try:
        yield
    finally:
        for name in names:
            site.fault_file(name).write_text("")


@asynccontextmanager
async def roll_catalogue(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Change models.toml and restart every process in turn, as an operator rolls a configuration out."""
    del fault, names
    file = site.stack.catalog_file
    text = file.read_text()
    file.write_text(text.replace("tpot_ms = 100", "tpot_ms = 110") if "= 100" in text else text.replace("110", "100"))
    for name in PROCESSES:
        await rolled(site, name)
    yield


async def rolled(site: Site, name: str) -> None:
    """Restart a process and wait until its successor serves."""
    before = site.stack.processes[name]
    seen = len(site.stack.log(name))
    await ended(site, name)
    await until(lambda: site.stack.processes[name] is not before, _END_S)
    if name in GATEWAYS:
        url = dict(site.gateways)[name]
        async with httpx.AsyncClient(timeout=2) as http:
            await until(lambda: answers(http, f"{url}/readyz"), _END_S)
    word = "worker_ready" if name in WORKERS else ""
    await until(lambda: word in site.stack.log(name)[seen:], _END_S)


async def answers(http: httpx.AsyncClient, url: str) -> bool:
    """Return whether a page is there."""
    try:
        return (await http.get(url)).status_code == 200
    except httpx.TransportError:
        return False


@asynccontextmanager
async def pin_ratio(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Pin the ratio of roles to what it is, by the operators' own switch."""
    del fault, names
    await site.redis.set(keys.steering(POOL), encode_steering(Steering(mode="shadow")))
    try:
        yield
    finally:
        await site.redis.delete(keys.steering(POOL))


@asynccontextmanager
async def old_version(site: Site, fault: Fault, names: Sequence[str]) -> AsyncIterator[None]:
    """Run a process in its earlier version beside others in this one, under load, and upgrade it."""
    del fault
    for name in names:
        site.old.add(name)
        await rolled(site, name)
    await asyncio.sleep(1.0)
    for name in names:
        site.old.discard(name)
        await rolled(site, name)
    yield


ACTIONS: Mapping[str, Action] = {
    "kill": kill, "freeze": freeze, "restart": restart, "memory ends": memory_ends,
    "cut": cut, "flap": flap, "slow": slow, "fail over": fail_over, "memory full": memory_full,
    "lock tables": lock_tables, "disk full": disk_full, "jump": jump,
    "hang": engine, "lose_hand_off": engine, "corrupt_kv": engine,
    "roll catalogue": roll_catalogue, "pin ratio": pin_ratio, "old version": old_version,
}  # fmt: skip
