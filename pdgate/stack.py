"""The whole of pdgate on one machine, in the foreground: what `pdgate up` runs.

1. Checks: platform and memory (else the timed engine), port, disk, the data folder's lock.
2. The reaper, then Valkey and PostgreSQL side by side, migrations, prices, first organisations and keys.
3. Scheduler, billing and gateway. From here on calls are answered, with 503 until workers are there.
4. In the background the engine's environment and the models, whichever are missing; then the workers.
5. When the gateway says ready: URL, key and a `curl`. Until a signal comes, what dies is started again.
6. Stop: the gateway, what is behind it, then PostgreSQL and Valkey, together within five seconds.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Final

import httpx
import msgspec
from alembic.util.exc import CommandError

from contracts.catalog import Catalog, CatalogError, read_catalog
from contracts.demo import DEMO_WEEK_ORG
from migrations.upgrade import upgrade
from pdgate import preflight
from pdgate.added_workers import AddedWorkers
from pdgate.children import Children, Reaper
from pdgate.commands import Commands
from pdgate.demo_week import new_state, read_state, write_state
from pdgate.engine import engine_ready, ensure_engine
from pdgate.envfile import ADMIN_TOKEN, PEER_TOKEN, read_env, write_env
from pdgate.fleet_host import FleetHost
from pdgate.greeting import greeting
from pdgate.layout import Layout, checkout
from pdgate.libibverbs import ensure_libibverbs
from pdgate.models import ensure_model, timed_models
from pdgate.mooncake import free_ports
from pdgate.preflight import CannotStart
from pdgate.roster import EngineKind, Options, Roster
from pdgate.scraping import Scraping
from pdgate.screen import Progress, Screen, duration
from pdgate.servers import Servers
from pdgate.services import ServiceError, short_socket
from pdgate.supervisor import Supervisor
from pdgate.tenancy import FirstKeys, prepare_tenants

EXIT_CANNOT_START: Final = 2
_POLL_S: Final = 0.1
_LISTEN_WITHIN_S: Final = 60.0


def run_stack(options: Options, layout: Layout, catalog_file: Path) -> int:
    """Run a stack until it is told to stop; return the exit code."""
    screen = Screen()
    try:
        catalog = read_catalog(catalog_file)
        options = _checked(options, layout, screen)
        with preflight.take_lock(layout.lock_file) as lock:
            return asyncio.run(_Stack(options, layout, catalog_file, catalog, screen).run(lock))
    except (CannotStart, CatalogError, ServiceError) as error:
        screen.clear()
        print(f"pdgate: {error}", file=sys.stderr)
        return EXIT_CANNOT_START


def _checked(options: Options, layout: Layout, screen: Screen) -> Options:
    """Return the options that can be had on this machine. Raises CannotStart."""
    if options.unified < 1 and (options.prefill < 1 or options.decode < 1):
        raise CannotStart("nothing could serve: ask for a prefill and a decode worker, or for a unified one")
    preflight.check_port(options.host, options.port)
    preflight.check_disk(layout.data, preflight.DATA_DISK_BYTES, "the data folder")
    if options.engine is EngineKind.SGLANG:
        if obstacle := preflight.real_engine_obstacle():
            screen.say(f"The real engine cannot run here: {obstacle}. Running the timed engine: SIMULATED TEXT.")
            return msgspec.structs.replace(options, engine=EngineKind.TIMED)
        if not engine_ready(layout.engine):
            preflight.check_disk(layout.engine.parent, preflight.ENGINE_DISK_BYTES, "the engine")
    return options


class _Stack:
    """One run of the stack."""

    def __init__(self, options: Options, layout: Layout, file: Path, catalog: Catalog, screen: Screen) -> None:
        self._options = options
        self._layout = layout
        self._catalog_file = file
        self._catalog = catalog
        self._screen = screen
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._failure: Exception | None = None
        self._scales = any(catalog.scaling_of(pool) is not None for pool in catalog.pools)
        self._fleet_socket = short_socket(layout.fleet_socket)

    async def run(self, lock: IO[str]) -> int:
        """Bring everything up, wait for a signal, take everything down."""
        reaper = Reaper(lock)
        children = Children(self._layout.logs, reaper)
        servers = Servers(self._layout, children, os.environ)
        try:
            async with asyncio.TaskGroup() as tasks:
                supervisor = Supervisor(tasks, children, self._screen.say)
                host = FleetHost(tasks, children, self._fleet_socket)
                with self._signals(supervisor, host):
                    work = [
                        tasks.create_task(self._guarded(servers, supervisor, reaper, host)),
                        tasks.create_task(self._watch(servers, reaper)),
                    ]
                    await self._stop.wait()
                    self._screen.clear()
                    for task in work:
                        task.cancel()
                    await host.close(supervisor.stop)
        finally:
            servers.stop()
            reaper.close()
            servers.close()
        if self._failure is not None:
            raise self._failure
        self._screen.say("Stopped.")
        return 0

    @contextlib.contextmanager
    def _signals(self, supervisor: Supervisor, host: FleetHost) -> Iterator[None]:
        """Stop on the first signal, kill on the second."""
        loop = asyncio.get_running_loop()

        def asked() -> None:
            if self._stop.is_set():
                supervisor.kill()
                host.kill()
            else:
                self._screen.say("Stopping …")
                self._stop.set()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, asked)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _guarded(self, servers: Servers, supervisor: Supervisor, reaper: Reaper, host: FleetHost) -> None:
        """Bring up; a failure stops the stack in good order instead of tearing it."""
        try:
            await self._bring_up(servers, supervisor, reaper, host)
        except* (CannotStart, ServiceError) as group:
            self._failure = next(_leaves(group))
            self._stop.set()

    async def _watch(self, servers: Servers, reaper: Reaper) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(servers.keep(self._screen.say))
            while True:
                await asyncio.sleep(1.0)
                reaper.revive()

    async def _bring_up(self, servers: Servers, supervisor: Supervisor, reaper: Reaper, host: FleetHost) -> None:
        await servers.start()
        try:
            await servers.call(lambda: upgrade(servers.database_url))
        except CommandError as error:
            raise CannotStart(f"the data in {self._layout.data} do not fit this version of pdgate: {error}") from None
        known = read_env(self._layout.env_file)
        if not known and self._options.demo_week and servers.embedded:
            write_state(self._layout.demo_week, new_state())
        keys = await prepare_tenants(
            database_url=servers.database_url,
            redis_url=servers.redis_url,
            catalog=self._catalog,
            known=known,
            demo=self._options.demo,
        )
        tokens = {name: known.get(name) or secrets.token_urlsafe(32) for name in (ADMIN_TOKEN, PEER_TOKEN)}
        self._write_env(servers, keys, {**known, **tokens})
        scraping = Scraping(self._layout.prometheus)
        roster = Roster(
            self._options,
            self._layout,
            self._catalog_file,
            redis_url=servers.redis_url,
            database_url=servers.database_url,
            inherited=_inherited(),
            admin_token=tokens[ADMIN_TOKEN],
            peer_token=tokens[PEER_TOKEN],
            store_ports=free_ports(),
            scraping=scraping,
            fleet_socket=self._fleet_socket if self._scales else None,
        )
        tokenizers = {model.tokenizer for model in self._catalog.models.values()}
        if self._options.engine is EngineKind.TIMED:
            timed_models(self._layout.timed_models, tokenizers)
        for spec in roster.services():
            supervisor.keep(spec)
        commands = Commands(self._screen.progress, reaper)
        async with httpx.AsyncClient(base_url=self._options.url, timeout=2.0, trust_env=False) as gateway:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._until_listening(gateway))
                preparing = tasks.create_task(self._prepare_models(tokenizers, commands))
            folders, extra_env = preparing.result()
            for spec in roster.workers(self._catalog, folders, extra_env):
                supervisor.keep(spec)
            rules = checkout() / "observability" / "rules"
            await host.open(roster.launches(self._catalog, folders, extra_env), scraping, rules)
            scraping.write(rules)
            await self._until_ready(gateway)
        if self._stop.is_set():
            return
        lines = greeting(
            self._options,
            self._layout,
            model=(model := next(iter(self._catalog.models))),
            scaling=self._catalog.scaling_of(self._catalog.pool_of(model)),
            key=keys.demo,
            sign_in=keys.sign_in,
            after_s=time.monotonic() - self._started,
            prometheus=(scraping.config, scraping.num_targets),
        )
        for line in lines:
            self._screen.say(line)
        added = AddedWorkers(
            roster,
            supervisor,
            servers.redis_url,
            extra_env,
            found=lambda: scraping.write(rules),
            say=self._screen.say,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(added.run())
            await self._play_demo_week(commands)

    async def _play_demo_week(self, commands: Commands) -> None:
        """Play the week that new data begin with, or the rest of one that was broken off. Failing, it is left out."""
        state = read_state(self._layout.demo_week)
        if state is None or state.done or not self._options.demo_week:
            return
        percent, started = 0, time.monotonic()

        def hear(line: str) -> None:
            nonlocal percent
            percent = int(line) if line.isascii() and line.isdigit() else percent

        def look() -> Progress:
            elapsed_s = time.monotonic() - started
            return Progress(step="a week of demo traffic", elapsed_s=elapsed_s, share=percent / 100)

        command = [sys.executable, "-m", "pdgate.demo_week", str(self._layout.demo_week)]
        env = {"PDGATE_DATA": str(self._layout.data), "PDGATE_CATALOG": str(self._catalog_file), **_inherited()}
        try:
            await commands.run(command, look=look, hear=hear, env=env)
        except CannotStart as error:
            self._screen.clear()
            self._screen.say(f"The week of demo traffic was left out: {error}")
            return
        self._screen.clear()
        self._screen.say(f"A week of demo traffic is at {self._options.url}/portal?org={DEMO_WEEK_ORG}")

    async def _prepare_models(
        self, tokenizers: Collection[str], commands: Commands
    ) -> tuple[Mapping[str, Path], Mapping[str, str]]:
        """Return the folder of each model, by tokenizer, and the variables the engine needs."""
        if self._options.engine is EngineKind.TIMED:
            return {name: self._layout.timed_models / name for name in tokenizers}, {}
        extra_env = {"PYTHONPATH": str(code_path(self._layout))}
        extra_env |= await ensure_libibverbs(self._layout.libraries, commands)
        await ensure_engine(self._layout.engine, commands)
        folders = {
            name: await ensure_model(name, self._layout.models, self._layout.engine, commands) for name in tokenizers
        }
        self._screen.clear()
        return folders, extra_env

    async def _until_listening(self, gateway: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + _LISTEN_WITHIN_S
        while not self._stop.is_set() and await _answer(gateway, "/livez") is None:
            if time.monotonic() > deadline:
                log = self._layout.logs / "gateway.log"
                raise CannotStart(f"the gateway does not answer on {self._options.url}: see {log}")
            await asyncio.sleep(_POLL_S)
        since_start = duration(time.monotonic() - self._started)
        self._screen.say(f"Gateway on {self._options.url} after {since_start}; workers follow.")

    async def _until_ready(self, gateway: httpx.AsyncClient) -> None:
        started = time.monotonic()
        while not self._stop.is_set():
            answer = await _answer(gateway, "/readyz")
            if answer is not None and answer.status_code == httpx.codes.OK:
                break
            self._screen.progress(Progress(step="workers are starting", elapsed_s=time.monotonic() - started))
            await asyncio.sleep(_POLL_S)
        self._screen.clear()

    def _write_env(self, servers: Servers, keys: FirstKeys, known: Mapping[str, str]) -> None:
        values = {
            "PDGATE_URL": self._options.url,
            "PDGATE_API_KEY": keys.demo or known.get("PDGATE_API_KEY", ""),
            "PDGATE_ADMIN_KEY": keys.admin,
            ADMIN_TOKEN: known[ADMIN_TOKEN],
            PEER_TOKEN: known[PEER_TOKEN],
            "PDGATE_PORTAL_URL": f"{self._options.url}/portal",
            "DATABASE_URL": servers.database_url,
            "REDIS_URL": servers.redis_url,
        }
        write_env(self._layout.env_file, values)


async def _answer(gateway: httpx.AsyncClient, path: str) -> httpx.Response | None:
    """Return the gateway's answer, None while it does not answer."""
    try:
        return await gateway.get(path)
    except httpx.TransportError:
        return None


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _inherited() -> Mapping[str, str]:
    """Return our environment for children, with the packages importable from any folder."""
    return {**os.environ, "PYTHONPATH": str(checkout()), "PYTHONUNBUFFERED": "1"}


def code_path(layout: Layout) -> Path:
    """Return the folder to put on the engine's PYTHONPATH: our packages, and nothing of our environment."""
    root = checkout()
    if (root / "pyproject.toml").exists():
        return root
    folder = layout.engine.parent / "code"
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("contracts", "observability", "workers"):
        link = folder / package
        link.unlink(missing_ok=True)
        link.symlink_to(root / package)
    return folder
