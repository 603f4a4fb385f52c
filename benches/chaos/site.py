"""The stack that faults are done to: two of everything, each process in a network of its own, kept running like by a
service manager.

Links between our processes are cut in the network (namespaces, which need root); each process reaches Valkey and
PostgreSQL through a relay of its own, which works for anybody. Without namespaces the faults that need them are left
out, and `lacks` says so.
"""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil
from redis.asyncio import Redis

from benches.chaos.clocks import Clocks
from benches.chaos.disks import Disks
from benches.chaos.plan import BILLING, GATEWAY, LEADER, POSTGRES, STANDBY, VALKEY
from benches.chaos.relay import Relay
from benches.partitions import Partitions, Unavailable
from benches.worker_faults import models_folder
from contracts import keys
from contracts.resp import redis_client
from migrations.upgrade import upgrade
from pdgate.services import Service, ServiceError, start_postgres, start_valkey
from tests.conftest import CATALOG
from tests.processes import Stack, free_port

POOL = "tiny"
GATEWAYS = (GATEWAY, "gateway-1")
SCHEDULERS = ("scheduler", "scheduler-1")
BILLINGS = (BILLING, "billing-1")
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "unified-0")
PROCESSES = (*GATEWAYS, *SCHEDULERS, *BILLINGS, *WORKERS)
_LOOK_S = 0.05
_START_S = 60.0
PATIENCE = {  # the defaults wait a minute for an engine that may be slow; this one never is
    "GATEWAY_FIRST_TOKEN_S": "3",
    "GATEWAY_FIRST_TOKEN_S_PER_1000": "1",
    "GATEWAY_BETWEEN_TOKENS_S": "3",
}
WORKER = {"WORKER_STEP_MS": "7", "WORKER_PROGRESS_GRACE_S": "1", "WORKER_HAND_OFF_TIMEOUT_S": "2"}


class Servers:
    """Valkey and PostgreSQL of this site alone."""

    def __init__(self, disks: Disks) -> None:
        self._disks = disks
        self.running: dict[str, Service] = {}
        self.valkey_number = 0

    def start(self, name: str) -> Service:
        """Start a server; a killed PostgreSQL's last backends may hold its memory for a moment."""
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                if name == VALKEY:
                    self.running[name] = start_valkey(self.valkey_folder(self.valkey_number))
                else:
                    self.running[name] = start_postgres(self._disks.folder(POSTGRES))
            except (ServiceError, OSError):
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
            else:
                return self.running[name]

    def valkey_folder(self, number: int) -> Path:
        """Return the data folder of the n-th Valkey: each fail-over makes another one."""
        return self._disks.folder(VALKEY) / f"valkey-{number}"

    def socket_of(self, name: str) -> str:
        """Return the path of a server's Unix socket."""
        url = urlsplit(self.running[name].url)
        return url.path if name == VALKEY else f"{parse_qs(url.query)['host'][0]}/.s.PGSQL.5432"

    def stop(self) -> None:
        """Stop both."""
        for service in self.running.values():
            with suppress(ProcessLookupError):
                service.process.send_signal(signal.SIGCONT)
            service.stop()


class Site:
    """Everything that runs, and the handles by which it is broken."""

    def __init__(self, folder: Path, old_tree: Path | None, *, has_relays: bool, workers: Mapping[str, str]) -> None:
        self.folder = folder
        self.has_relays = has_relays
        self.worker = WORKER | workers  # environment of every worker
        self.old_tree = old_tree  # an earlier version of the project, for upgrades
        self.old: set[str] = set()  # processes that run it
        self.lacks: dict[str, str] = {}  # what this machine cannot do, and why
        self.down: set[str] = set()  # processes and servers that the service manager leaves alone
        self.starts: dict[str, int] = {}
        self.relays: dict[tuple[str, str], Relay] = {}  # by caller and server
        self.disks = Disks(folder / "disks")
        if self.disks.lacks:
            self.lacks["disk"] = self.disks.lacks
        self.clocks = Clocks(folder / "clocks")
        if self.clocks.lacks:
            self.lacks["clock"] = self.clocks.lacks
        self.servers = Servers(self.disks)
        self.net: Partitions | None = None
        try:
            self.net = Partitions(PROCESSES)
        except Unavailable as why:
            self.lacks["network"] = str(why)
        if old_tree is None:
            self.lacks["upgrade"] = "no earlier version: this is no git checkout, or it has one commit only"

    stack: Stack
    database: asyncpg.Connection
    redis: Redis

    @property
    def hub(self) -> str:
        """The address at which processes reach the relays."""
        return self.net.hub if self.net is not None else "127.0.0.1"

    async def resolve(self, name: str) -> str:
        """Return the process that a word of the plan means at this moment."""
        if name not in (LEADER, STANDBY):
            return name
        value = await self.redis.get(keys.leader(POOL))
        leader = value.decode().rpartition(":")[0] if value else SCHEDULERS[0]
        return leader if name == LEADER else next(one for one in SCHEDULERS if one != leader)

    async def reconnect(self) -> None:
        """Follow Valkey to where it is: its socket moves with a fail-over, connections end with it."""
        await self.redis.aclose()
        self.redis = redis_client(self.servers.running[VALKEY].url)

    def process(self, name: str) -> "subprocess.Popen[bytes]":
        """Return a process of ours or a server's."""
        if name in self.servers.running:
            return self.servers.running[name].process
        return self.stack.processes[name]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process; PostgreSQL's, to its backends too where it is to freeze or die."""
        process = self.process(name)
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            family = psutil.Process(process.pid).children(recursive=True) if name == POSTGRES else []
            process.send_signal(number)
            if number in (signal.SIGSTOP, signal.SIGCONT):
                for child in family:
                    with suppress(psutil.NoSuchProcess):
                        child.send_signal(number)

    async def supervise(self) -> None:
        """Start again whatever has ended, like a service manager, until cancelled."""
        while True:
            for name in PROCESSES:
                if name not in self.down and self.stack.processes[name].poll() is not None:
                    self.start(name)
            for name in (VALKEY, POSTGRES):
                if name not in self.down and self.servers.running[name].process.poll() is not None:
                    await asyncio.to_thread(self.servers.start, name)
            await asyncio.sleep(_LOOK_S)

    def start(self, name: str) -> None:
        """Start one of our processes."""
        self.starts[name] = self.starts.get(name, 0) + 1
        self.stack.start(name)

    def wrapped(self, name: str, argv: list[str]) -> list[str]:
        """Return how a process is started: in its network, with its clock, from its version's tree."""
        if name in self.old and self.old_tree is not None:
            argv = ["env", "-C", str(self.old_tree), f"PYTHONPATH={self.old_tree}", *argv]
        if name in self.clocks.names:
            argv = ["env", *self.clocks.environ(name), *argv]
        return self.net.command(name, argv) if self.net is not None else argv

    async def link(self, name: str) -> dict[str, str]:
        """Make a process's own relays and return the URLs by which it calls the servers."""
        urls = {}
        if not self.has_relays:
            return {server: self.servers.running[server].url for server in (VALKEY, POSTGRES)}
        for server in (VALKEY, POSTGRES):
            relay = Relay(self.servers.socket_of(server))
            self.relays[name, server] = relay
            port = await relay.listen(self.hub)
            scheme, path = ("redis", "0") if server == VALKEY else ("postgresql", "pdgate")
            urls[server] = f"{scheme}://{'pdgate@' if server == POSTGRES else ''}{self.hub}:{port}/{path}"
        return urls

    async def build(self) -> None:
        """Start the servers and add every process."""
        valkey = await asyncio.to_thread(self.servers.start, VALKEY)
        postgres = await asyncio.to_thread(self.servers.start, POSTGRES)
        await asyncio.to_thread(upgrade, postgres.url)
        catalog_file = self.folder / "models.toml"
        catalog_file.write_text(CATALOG)
        self.stack = stack = Stack(
            folder=self.folder,
            redis_url=valkey.url,
            database_url=postgres.url,
            catalog_file=catalog_file,
            models_dir=models_folder(self.folder),
        )
        if self.net is not None:
            stack.hosts = {name: self.net.address(name) for name in PROCESSES}
        stack.wrap = self.wrapped
        await stack.seed(concurrency=2000)
        adds: list[tuple[str, Callable[[], None]]] = [
            (GATEWAYS[0], stack.add_gateway),
            (GATEWAYS[1], lambda: stack.add_gateway(GATEWAYS[1], port=free_port())),
            *((name, lambda name=name: stack.add_scheduler(name)) for name in SCHEDULERS),
            *((name, lambda name=name: stack.add_billing(name)) for name in BILLINGS),
            *((name, lambda name=name: stack.add_worker(name, role=name.partition("-")[0])) for name in WORKERS),
        ]
        journals = self.disks.folder("journals")
        for name, add in adds:
            urls = await self.link(name)
            stack.redis_url, stack.database_url = urls[VALKEY], urls[POSTGRES]
            add()
            environ = stack.environ(name)
            if name in GATEWAYS:
                environ |= {**PATIENCE, "GATEWAY_JOURNAL_DIR": str(journals / name)}
            elif name in SCHEDULERS:
                environ |= {"SCHEDULER_ID": name, "SCHEDULER_RATIO_MODE": "manual"}
            elif name in WORKERS:
                journal, faults = str(journals / name), str(self.fault_file(name))
                environ |= {**self.worker, "WORKER_JOURNAL_DIR": journal, "WORKER_FAULTS_FILE": faults}
        stack.redis_url, stack.database_url = valkey.url, postgres.url

    def fault_file(self, name: str) -> Path:
        """Return the file whose words switch faults of a worker's engine on."""
        return self.folder / f"faults-{name}"

    @property
    def gateways(self) -> list[tuple[str, str]]:
        """Name and URL of each gateway."""
        return [(name, f"http://{self.stack.host(name)}:{self.stack.metrics_ports[name]}") for name in GATEWAYS]


@asynccontextmanager
async def running(
    folder: Path, old_tree: Path | None, *, has_relays: bool = True, workers: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Site]:
    """Run a site on services of its own; leave nothing behind. Without relays nothing goes through this process.

    `workers`: environment of every worker, beside what faults need.
    """
    site = Site(folder, old_tree, has_relays=has_relays, workers=workers)
    try:
        await site.build()
        site.redis = redis_client(site.servers.running[VALKEY].url)
        site.database = await asyncpg.connect(site.servers.running[POSTGRES].url)
        for name in PROCESSES:
            site.start(name)
        try:
            yield site
        finally:
            site.down |= {*PROCESSES, VALKEY, POSTGRES}
            await site.redis.aclose()
            site.database.terminate()
            for relay in site.relays.values():
                relay.heal()
            await asyncio.to_thread(site.stack.stop)
            for relay in site.relays.values():
                relay.close()
    finally:
        await asyncio.to_thread(site.servers.stop)
        site.disks.close()
        if site.net is not None:
            site.net.close()


def end_cleanly() -> None:
    """Let SIGTERM end the calling task as Ctrl-C does: namespaces and mounts must not be left behind."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def old_version(ref: str, folder: Path) -> Path | None:
    """Unpack an earlier commit of this checkout; None = there is none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    tree = folder / "old"
    tree.mkdir()
    with subprocess.Popen(
        ["git", "-C", str(root), "archive", ref], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as git:
        unpacked = subprocess.run(["tar", "-x", "-C", str(tree)], stdin=git.stdout, check=False, capture_output=True)
    return tree if git.returncode == 0 and unpacked.returncode == 0 else None
