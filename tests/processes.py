"""The whole stack as processes, for tests that kill them and for benchmarks that time them.

Every process is real and is started by its own `python -m`, with the environment a deployment would
give it. `pdgate up` is not used here so that a test decides itself which process lives.
"""

import asyncio
import inspect
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from sqlalchemy.ext.asyncio import create_async_engine

from billing.prices import sync_catalog
from contracts.catalog import read_catalog
from contracts.environment import asyncpg_url
from contracts.resp import redis_client
from gateway.limits import Limits
from gateway.tenants import Tenants, publish_key_state
from pdgate.engine import engine_python as python_of
from pdgate.layout import DEFAULT_DATA, layout_of

REPOSITORY = Path(__file__).parent.parent
PEER_TOKEN = "what-processes-of-tests-show-each-other"
LISTENING_PORTS = (10_240, 32_768)


def free_port() -> int:
    """Return a TCP port that was free a moment ago, and that nobody gets by asking for any port.

    Ports that a system gives away itself, above 32767 on Linux, may be a connection's before the caller listens there.
    """
    while True:
        port = random.randrange(*LISTENING_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def engine_python() -> str:
    """Return the interpreter of the engine's environment; fail when it was not made."""
    named = os.environ.get("PDGATE_ENGINE_PYTHON")
    python = Path(named) if named else python_of(layout_of(DEFAULT_DATA).engine)
    if not python.exists():
        raise FileNotFoundError(f"{python} is missing: run `make engine`, or set PDGATE_ENGINE_PYTHON")
    return str(python)


class Stack:
    """Named processes over one Valkey and one PostgreSQL."""

    def __init__(
        self, *, folder: Path, redis_url: str, database_url: str, catalog_file: Path, models_dir: Path
    ) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.database_url = database_url
        self.catalog_file = catalog_file
        self.models_dir = models_dir
        self.gateway_port = free_port()
        self.api_key = ""
        self.org = ""
        self.key_id = ""
        self.otlp_endpoint = ""  # set before processes are added
        self.hosts: dict[str, str] = {}  # processes that listen elsewhere than on loopback; set before they are added
        self.wrap: Callable[[str, list[str]], list[str]] = lambda _, argv: argv  # how a process is started, by its name
        self.metrics_ports: dict[str, int] = {}  # of every process, the gateways included
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what was added."""
        return tuple(self._commands)

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"http://{self.host('gateway')}:{self.gateway_port}"

    def host(self, name: str) -> str:
        """Return the address that a process listens on."""
        return self.hosts.get(name, "127.0.0.1")

    async def seed(self, *, concurrency: int = 512, limits: Limits | None = None) -> None:
        """Create an organisation with a project and a key, and the catalogue's prices."""
        engine = create_async_engine(asyncpg_url(self.database_url))
        redis = redis_client(self.redis_url)
        try:
            async with engine.begin() as connection:
                await sync_catalog(connection, read_catalog(self.catalog_file))
            tenants = Tenants(engine)
            org = await tenants.create_organisation("Test")
            project = await tenants.create_project(org.id, "Default")
            key, self.api_key = await tenants.create_key(
                org.id, project.id, "test", limits=limits or Limits(concurrent_requests=concurrency)
            )
            await publish_key_state(redis, key)
            self.org, self.key_id = org.id, key.id
        finally:
            await redis.aclose()
            await engine.dispose()

    # -- what to start -------------------------------------------------------------------------------------

    def add_gateway(self, name: str = "gateway", *, port: int | None = None, cpu_profile: bool = False) -> None:
        """Add a gateway process; the CPU profile waits longer before it gives a worker's link up."""
        timers = {"GATEWAY_LINK_CHECK_S": "5"} if cpu_profile else {}
        self._add(
            name,
            [sys.executable, "-m", "gateway"],
            {
                "GATEWAY_LISTEN": f"{self.host(name)}:{port or self.gateway_port}",
                "GATEWAY_REDIS_URL": self.redis_url,
                "GATEWAY_PEER_TOKEN": PEER_TOKEN,
                "GATEWAY_DATABASE_URL": self.database_url,
                "GATEWAY_CATALOG": str(self.catalog_file),
                "GATEWAY_MODELS_DIR": str(self.models_dir),
                "GATEWAY_JOURNAL_DIR": str(self.folder / f"journal-{name}"),
                **timers,
            },
        )

    def add_scheduler(
        self, name: str = "scheduler", *, cpu_profile: bool = False, environ: Mapping[str, str] | None = None
    ) -> None:
        """Add a scheduler; the CPU profile waits longer before it gives a worker up."""
        timers = {"SCHEDULER_SUSPECT_AFTER_S": "1", "SCHEDULER_DEAD_AFTER_S": "5"} if cpu_profile else {}
        self._add(
            name,
            [sys.executable, "-m", "scheduler"],
            {
                "SCHEDULER_REDIS_URL": self.redis_url,
                "SCHEDULER_PEER_TOKEN": PEER_TOKEN,
                "SCHEDULER_CATALOG": str(self.catalog_file),
                **timers,
                **(environ or {}),
            },
        )

    def add_billing(self, name: str = "billing") -> None:
        """Add a billing consumer."""
        self._add(
            name,
            [sys.executable, "-m", "billing"],
            {
                "BILLING_REDIS_URL": self.redis_url,
                "BILLING_DATABASE_URL": self.database_url,
                "BILLING_CATALOG": str(self.catalog_file),
            },
        )

    def add_worker(
        self,
        name: str,
        *,
        role: str,
        pool: str = "tiny",
        engine: str = "timed",
        model: str = "tiny",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Add a worker with the timed engine, or with the real one in the engine's own environment."""
        python = engine_python() if engine == "sglang" else sys.executable
        self._add(
            name,
            [python, "-m", "workers"],
            {
                "WORKER_ID": name,
                "WORKER_POOL": pool,
                "WORKER_ROLE": role,
                "WORKER_ENGINE": engine,
                "WORKER_LISTEN": f"{self.host(name)}:0",
                "WORKER_BOOTSTRAP_HOST": self.host(name),
                "WORKER_REDIS_URL": self.redis_url,
                "WORKER_PEER_TOKEN": PEER_TOKEN,
                "WORKER_CATALOG": str(self.catalog_file),
                "WORKER_MODEL_PATH": str(self.models_dir / model),
                "WORKER_JOURNAL_DIR": str(self.folder / f"journal-{name}"),
                **(environ or {}),
            },
        )

    def environ(self, name: str) -> dict[str, str]:
        """Return the settings with which a process that was added will start, to be changed."""
        return self._commands[name][1]

    def _add(self, name: str, argv: list[str], environ: dict[str, str]) -> None:
        prefix = {"workers": "WORKER"}.get(argv[-1], argv[-1].upper())
        if "GATEWAY_LISTEN" in environ:
            self.metrics_ports[name] = int(environ["GATEWAY_LISTEN"].rpartition(":")[2])
        else:
            self.metrics_ports[name] = free_port()
            environ.setdefault(f"{prefix}_METRICS_LISTEN", f"{self.host(name)}:{self.metrics_ports[name]}")
        if self.otlp_endpoint:
            environ.setdefault(f"{prefix}_OTLP_ENDPOINT", self.otlp_endpoint)
        self._commands[name] = (argv, environ)

    # -- running them ----------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start the named processes, or all that were added."""
        for name in names or tuple(self._commands):
            argv, environ = self._commands[name]
            argv = self.wrap(name, argv)
            with (self.folder / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    argv,
                    env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """Send a signal to one process and, if it ends the process, wait for that."""
        process = self.processes[name]
        process.send_signal(how)
        if how == signal.SIGKILL:
            process.wait(10)

    def stop(self) -> None:
        """Stop everything; what does not end within five seconds is killed with its whole group."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 8
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def log(self, name: str) -> str:
        """Return what a process wrote so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    async def unready(self, timeout_s: float = 30) -> None:
        """Wait until the gateway has seen that a model can no longer be served."""

        async def is_unready() -> bool:
            return (await client.get("/readyz")).status_code != 200

        async with httpx.AsyncClient(base_url=self.url, timeout=5) as client:
            await until(is_unready, timeout_s)

    async def ready(self, timeout_s: float = 60) -> None:
        """Wait until the gateway says that every model can be served."""
        last = "no answer yet"

        async def is_ready() -> bool:
            nonlocal last
            try:
                answer = await client.get("/readyz")
            except httpx.TransportError as error:
                last = repr(error)
                return False
            last = answer.text
            return answer.status_code == 200

        async with httpx.AsyncClient(base_url=self.url, timeout=5) as client:
            try:
                await until(is_ready, timeout_s)
            except TimeoutError:
                ended = {n: p.returncode for n, p in self.processes.items() if p.poll() is not None}
                tails = "".join(f"\n--- {name}\n{self.log(name)[-1500:]}" for name in self.processes)
                raise TimeoutError(f"not ready within {timeout_s} s: {last}; ended: {ended}{tails}") from None


async def until(check: Callable[[], object], timeout_s: float = 30, every_s: float = 0.05) -> None:
    """Wait until `check` (plain or async) is true; raise TimeoutError when that takes too long."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = check()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return
            await asyncio.sleep(every_s)
