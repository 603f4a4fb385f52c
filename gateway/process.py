"""The gateway process: `python -m gateway`. Settings: `GATEWAY_*`.

HTTP is served in this process, on this event loop: nothing forks, so `kill -9` leaves nothing behind,
and the gateway's tasks and its HTTP handlers share one loop.

SIGTERM: no new connections; running streams get `shutdown_grace_s` to end by themselves, then break off
with an error event; settlements drain; exit, whatever clients keep their connections open.
"""

import asyncio
import os
import resource
import signal
import socket
import tempfile
import uuid
from contextlib import suppress

import structlog
import uvloop

from contracts.catalog import CatalogError, read_catalog
from contracts.environment import SettingsError, from_env
from gateway.app import Gateway, create_app
from gateway.http_server import http_server
from gateway.settings import Settings
from observability import heap
from observability.telemetry import Telemetry, configure_logging

log = structlog.get_logger()

_OPEN_FILES = 32_768
_FIRST_LOOK_S = 1.0  # whatever is away by then, the port opens
_LOOK_AGAIN_S = 0.01
_LAST_BYTES_S = 0.5  # for the last frames of broken streams; who has not sent a whole request is not waited for


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    try:
        catalog = read_catalog(settings.catalog)
    except CatalogError as error:
        raise SettingsError(f"GATEWAY_CATALOG: {error}") from None
    host, port = settings.address
    _check_place(settings, host, port)
    gateway_id = str(uuid.uuid4())
    telemetry = Telemetry()
    gateway = Gateway(settings, catalog, telemetry, gateway_id=gateway_id)
    server = http_server(create_app(gateway, telemetry), settings)
    heap.settle()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("gateway_starting", gateway_id=gateway_id, listen=settings.listen, pid=os.getpid())
    async with gateway.running():
        await _look_around(gateway)
        serving = loop.create_task(server.serve())
        stopped = loop.create_task(stop.wait())
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if serving.done():
            raise SystemExit(f"gateway: the server ended by itself: {serving.exception()}")
        gateway.starter.stopping = True
        server.stop()
        if not await _ended(serving, settings.shutdown_grace_s):
            gateway.stop_streams()
            if not await _ended(serving, _LAST_BYTES_S):
                log.info("connections_left")
                serving.cancel()
    log.info("gateway_stopped", gateway_id=gateway_id)


async def _look_around(gateway: Gateway) -> None:
    """Wait for the first look at prices, workers and tokenizers, a little: else the first requests find none."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_LOOK_S):
            while not (gateway.prices.database_up and gateway.fleet.redis_up and gateway.models.looked):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_AGAIN_S)


async def _ended(task: asyncio.Task[None], timeout_s: float) -> bool:
    done, _ = await asyncio.wait((task,), timeout=timeout_s)
    return bool(done)


def _check_place(settings: Settings, host: str, port: int) -> None:
    """Raise SettingsError when the port or the journal's folder cannot be had: better said before the rest starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise SettingsError(f"GATEWAY_LISTEN: cannot listen on {settings.listen}: {error.strerror}") from None
    try:
        settings.journal_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.journal_dir):
            pass
    except OSError as error:
        raise SettingsError(f"GATEWAY_JOURNAL_DIR: cannot write to {settings.journal_dir}: {error.strerror}") from None


def _open_many_files() -> None:
    """Let the process have as many connections as it may: shells and systemd begin with room for 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Read the settings and serve."""
    settings = from_env(Settings, "GATEWAY_", os.environ)
    configure_logging("gateway", level=settings.log_level, json=settings.log_json)
    _open_many_files()
    heap.begin()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one prompt at a time, in threads of our own
    uvloop.run(serve(settings))
