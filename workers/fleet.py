"""Many timed workers in one process, each with its own server, lease and epoch: `python -m workers.fleet`.

    WORKER_ID=fleet WORKER_POOL=tiny WORKER_ROLE=unified WORKER_ENGINE=timed WORKER_REDIS_URL=... WORKER_CATALOG=... \
        python -m workers.fleet --prefill 24 --decode 32 --unified 8

Settings are those of one worker (`WORKER_*`) and hold for all; a worker's id is `WORKER_ID-role-number`. For load tests
and simulations of fleets: nothing of it is for serving, since all workers die together.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import structlog
import uvloop
from redis.asyncio import Redis

from contracts.catalog import Catalog, read_catalog
from contracts.credentials import credentials_of
from contracts.environment import SettingsError, from_env
from contracts.lifecycle import Role
from contracts.resp import RespConnection, redis_client
from observability.telemetry import configure_logging
from workers.assignments import Identity
from workers.configured_engine import build_engine
from workers.expert_table import ExpertTable
from workers.heartbeat import Heartbeat
from workers.kv_table import KvTable
from workers.outbox import Limits
from workers.process import registration_of, revision_of
from workers.records import TIMEOUT_S, Recorder
from workers.server import WorkerServer
from workers.settings import Settings

log = structlog.get_logger()


class FleetWorker(msgspec.Struct, frozen=True):
    """One worker of a fleet."""

    worker_id: str
    address: str
    server: WorkerServer


@asynccontextmanager
async def running_fleet(
    settings: Settings, catalog: Catalog, roles: Mapping[Role, int]
) -> AsyncIterator[list[FleetWorker]]:
    """Run `roles[role]` timed workers of each role until the context is left; then all stop in order.

    Raises:
        SettingsError: the engine is not the timed one, or addresses are fixed that only one worker can have.
    """
    if settings.engine != "timed":
        raise SettingsError("WORKER_ENGINE: a fleet in one process is for the timed engine")
    if not settings.listen.endswith(":0") or settings.bootstrap_port:
        raise SettingsError("WORKER_LISTEN and WORKER_BOOTSTRAP_PORT: the workers of a fleet take free ports")
    revision = revision_of(settings)
    redis = redis_client(settings.redis_url)
    # One for all: what an attempt cost says itself which worker it was.
    recorder = Recorder(RespConnection(settings.redis_url, timeout_s=TIMEOUT_S), settings.pool, None)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        recording = tasks.create_task(recorder.run())
        stack.callback(recorder.close)
        stack.push_async_callback(recorder.flush)
        stack.push_async_callback(_end, recording)
        workers = []
        for role, number in roles.items():
            for index in range(number):
                own = msgspec.structs.replace(settings, id=f"{settings.id}-{role}-{index}", role=role)
                worker = await _start(stack, tasks, own, catalog, redis, recorder, revision=revision)
                workers.append(worker)
        log.info("fleet_ready", workers=len(workers), pool=settings.pool)
        yield workers


async def _start(
    stack: AsyncExitStack,
    tasks: asyncio.TaskGroup,
    settings: Settings,
    catalog: Catalog,
    redis: Redis,
    recorder: Recorder,
    *,
    revision: str,
) -> FleetWorker:
    identity = Identity(
        worker_id=settings.id,
        epoch=int(time.time() * 1000),
        pool=settings.pool,
    )
    kv = KvTable(revision)
    server = WorkerServer(
        identity,
        settings.role,
        build_engine(settings, catalog, kv, ExpertTable(), revision=revision),
        limits=Limits(
            max_chunks=settings.ring_chunks,
            coalesce_s=settings.coalesce_ms / 1000,
            reader_lost_s=settings.reader_lost_s,
        ),
        recorder=recorder,
        min_grace_s=settings.progress_grace_s,
        kv=kv,
        credentials=credentials_of("WORKER_", settings, listen=settings.listen, open_health=settings.open_health),
    )
    address = await server.start(settings.listen)
    heartbeat = Heartbeat(redis, registration_of(settings, server, catalog, address=address, revision=revision))
    server.condition.on_change = heartbeat.renew_soon
    await heartbeat.claim()
    serving, beating = tasks.create_task(server.run()), tasks.create_task(heartbeat.run())

    async def stop() -> None:
        await _end(beating)
        await heartbeat.remove()
        await server.drain()
        await _end(serving)
        await server.stop()

    stack.push_async_callback(stop)
    return FleetWorker(settings.id, address, server)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


async def serve(settings: Settings, catalog: Catalog, roles: Mapping[Role, int]) -> None:
    """Run a fleet until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with running_fleet(settings, catalog, roles):
        await stop.wait()


def main() -> None:
    """Read arguments and settings, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for role in Role:
        parser.add_argument(f"--{role}", type=int, default=0, metavar="N", help=f"{role} workers")
    asked = parser.parse_args()
    settings = from_env(Settings, "WORKER_", os.environ)
    configure_logging("worker", level=settings.log_level, json=settings.log_json)
    roles = {role: getattr(asked, role) for role in Role if getattr(asked, role) > 0}
    if not roles:
        sys.exit("name at least one of --prefill, --decode and --unified")
    uvloop.run(serve(settings, read_catalog(Path(settings.catalog)), roles))


if __name__ == "__main__":
    main()
