"""One worker process from settings to exit. Builds everything; nothing else knows concrete classes."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import structlog
import uvloop
from redis.exceptions import RedisError

from contracts.additions import AddedModel, live, read_added
from contracts.catalog import Catalog, CatalogError, read_catalog
from contracts.credentials import credentials_of
from contracts.environment import SettingsError, from_env, metrics_address
from contracts.lifecycle import Role
from contracts.prefix import HASH_FORMAT
from contracts.resp import RespConnection, redis_client
from contracts.wire import Registration
from observability import heap
from observability.loop_lag import watch_loop_lag
from observability.metrics import Instruments
from observability.telemetry import Telemetry, configure_logging
from observability.tracing import Tracer
from workers.accelerators import find_accelerators
from workers.assignments import Identity
from workers.configured_engine import build_engine, context_tokens_of
from workers.engine import Engine, EngineFacts
from workers.engines.http import HttpEngine
from workers.expert_table import ExpertTable
from workers.first_prompts import FirstPrompts, read_first_prompts
from workers.heartbeat import Fenced, Heartbeat
from workers.kv_table import KvTable
from workers.model_files import model_revision
from workers.outbox import Limits
from workers.records import TIMEOUT_S, Journal, Recorder
from workers.retelling import Retelling
from workers.roles import RestartNeeded
from workers.server import WorkerServer
from workers.settings import Settings
from workers.sleep import CAPABILITY as SLEEP_CAPABILITY
from workers.sleep import Sleeper
from workers.spans import Spans
from workers.store_sweeper import StoreSweeper
from workers.stores import sweeper_of

log = structlog.get_logger()

EXIT_RESTART = 75  # EX_TEMPFAIL: the supervisor should start the worker again
EXIT_FENCED = 76  # another process with the same id has taken over


_E = TypeVar("_E", bound=BaseException)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How the process ends: with a status, or by starting again in another role."""

    status: int = 0
    role: Role | None = None


def catalog_of(settings: Settings) -> Catalog:
    """Return the catalogue's file, and with it the models that were added, where the pool is one of theirs.

    Raises:
        SettingsError: the file cannot be used, or does not name the pool and Redis cannot say what was added.
    """
    try:
        catalog = read_catalog(Path(settings.catalog))
    except CatalogError as error:
        raise SettingsError(f"WORKER_CATALOG: {error}") from None
    if settings.pool in catalog.pools:
        return catalog
    catalog, models = live(catalog)
    models.take(asyncio.run(_added(settings)))
    return catalog


async def _added(settings: Settings) -> Sequence[AddedModel]:
    redis = redis_client(settings.redis_url)
    try:
        return await read_added(redis) or ()
    except (RedisError, OSError, TimeoutError) as error:
        raise SettingsError(
            f"WORKER_POOL: the catalogue has no model in pool {settings.pool!r}, and which ones were added beside it"
            f" cannot be asked: {error}"
        ) from None
    finally:
        await redis.aclose()


def revision_of(settings: Settings) -> str:
    """Return the model revision, or stop with a line that says what is wrong with the folder."""
    if not settings.model_path:
        if settings.engine == "sglang":
            raise SettingsError("WORKER_MODEL_PATH: must be set for the sglang engine")
        return "timed"
    try:
        return model_revision(Path(settings.model_path))
    except OSError as error:
        if settings.engine == "timed":
            return "timed"
        raise SettingsError(f"WORKER_MODEL_PATH: {error}") from None


async def serve(
    settings: Settings,
    engine: Engine,
    catalog: Catalog,
    kv: KvTable,
    experts: ExpertTable,
    *,
    revision: str,
    started_unix_ms: int,
    first_prompts: FirstPrompts,
) -> Ending:
    """Run the worker until SIGTERM or SIGINT, then stop gracefully; or until it must start again, or is fenced off."""
    identity = Identity(
        worker_id=settings.id,
        epoch=started_unix_ms,
        pool=settings.pool,
    )
    telemetry = Telemetry()
    tracer = Tracer("worker", settings.id, endpoint=settings.otlp_endpoint)
    redis = redis_client(settings.redis_url)
    journal = Journal(Path(settings.journal_dir), settings.id) if settings.journal_dir else None
    recorder = Recorder(RespConnection(settings.redis_url, timeout_s=TIMEOUT_S), settings.pool, journal)
    server = WorkerServer(
        identity,
        settings.role,
        engine,
        limits=Limits(
            max_chunks=settings.ring_chunks,
            coalesce_s=settings.coalesce_ms / 1000,
            reader_lost_s=settings.reader_lost_s,
        ),
        recorder=recorder,
        instruments=telemetry.instruments,
        spans=Spans(tracer, worker_id=settings.id, pool=settings.pool),
        min_grace_s=settings.progress_grace_s,
        may_restart=True,
        kv=kv,
        experts=experts,
        accelerators=find_accelerators() if settings.engine == "sglang" else None,
        sleeper=sleeper_of(settings, engine),
        first_prompts=first_prompts,
        credentials=credentials_of("WORKER_", settings, listen=settings.listen, open_health=settings.open_health),
    )
    address = await server.start(settings.listen)
    if settings.advertise:
        address = f"{settings.advertise}:{address.rpartition(':')[2]}"
    heartbeat = Heartbeat(redis, registration_of(settings, server, catalog, address=address, revision=revision))
    server.condition.on_change = heartbeat.renew_soon
    _observe_load(telemetry, server, settings)
    if settings.engine != "sglang":  # which sees to its own
        heap.settle()
    beside: list[StoreSweeper | Retelling] = [Retelling(redis, settings.pool, journal)] if journal is not None else []
    if (sweeper := sweeper_of(settings)) is not None:
        beside.append(sweeper)
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    ending = Ending()
    with telemetry.serve(*metrics_address("WORKER_METRICS_LISTEN", settings.metrics_listen)):
        log.info("worker_ready", address=address, role=settings.role, engine=settings.engine)
        try:
            await _run_until(stop, server, heartbeat, recorder, telemetry.instruments, beside, drain_s=settings.drain_s)
        except* RestartNeeded as needed:
            why = _first(needed)
            ending = Ending(status=EXIT_RESTART, role=why.role)
            log.warning("worker_starts_again", why=str(why), role=why.role)
        except* Fenced as fenced:
            ending = Ending(status=EXIT_FENCED)
            log.error("worker_fenced", why=str(_first(fenced)))  # noqa: TRY400 - expected, and told in full
        await heartbeat.remove()
        await server.stop()
        await recorder.flush()
    recorder.close()
    await redis.aclose()
    await asyncio.to_thread(tracer.close)
    return ending


def sleeper_of(settings: Settings, engine: Engine) -> Sleeper | None:
    """Return the engine as one that can sleep, where it can and may. Raises SettingsError where it may and cannot."""
    if not settings.sleeps:
        return None
    if isinstance(engine, HttpEngine):
        raise SettingsError("WORKER_SLEEPS: the memory of a foreign server is its own")
    return cast("Sleeper", engine)  # the other two can, and the real one's class cannot be named here


async def _run_until(
    stop: asyncio.Event,
    server: WorkerServer,
    heartbeat: Heartbeat,
    recorder: Recorder,
    instruments: Instruments,
    beside: Sequence[StoreSweeper | Retelling],
    *,
    drain_s: float,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        await heartbeat.claim()
        running = [tasks.create_task(part.run()) for part in (server, heartbeat, recorder)]
        running.append(tasks.create_task(watch_loop_lag(instruments)))
        running += [tasks.create_task(one.run()) for one in beside]
        await stop.wait()
        log.info("worker_stops", running=len(server.assignments))
        await server.wind_down(drain_s)
        running[1].cancel()
        await heartbeat.remove()
        await server.drain()
        for task in running:
            task.cancel()


def _first(group: BaseExceptionGroup[_E]) -> _E:
    """Return the cause inside nested groups."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def registration_of(
    settings: Settings, server: WorkerServer, catalog: Catalog, *, address: str, revision: str
) -> Callable[[], Registration]:
    """Return what the heartbeat writes: the facts once, state and load as they are at each call."""
    context_tokens = context_tokens_of(catalog, settings.pool)

    def registration() -> Registration:
        condition = server.condition
        facts = condition.facts
        assert facts is not None, "the server has started"
        load = condition.load
        return Registration(
            worker_id=settings.id,
            epoch=condition.identity.epoch,
            pid=os.getpid(),
            address=address,
            pool=settings.pool,
            role=condition.role,
            state=condition.state,
            engine=facts.name,
            simulated=facts.simulated,
            model_path=Path(settings.model_path).name,
            model_revision=revision,
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            page_size=facts.page_size,
            tp_size=facts.tp_size,
            dp_size=facts.dp_size,
            transfer_backend=facts.transfer_backend,
            bootstrap_host=facts.bootstrap_host,
            bootstrap_port=facts.bootstrap_port,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            max_running=facts.max_running,
            context_tokens=min(context_tokens, facts.context_tokens),
            hand_offs=facts.hand_offs,
            latency=facts.latency,
            catalog_revision=catalog.revision,
            started_unix_ms=condition.identity.epoch,
            zone=settings.zone,
            hash_format=HASH_FORMAT if facts.tells_blocks else "",
            node=settings.node or socket.gethostname(),
            capabilities=(
                "probe",
                *((SLEEP_CAPABILITY,) if facts.sleeps else ()),
                *(f"switch_{role}" for role in sorted(_roles_to_take(facts, condition.role))),
            ),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_used=min(1.0, load.kv_used_tokens / facts.kv_capacity_tokens),
        )

    return registration


def _roles_to_take(facts: EngineFacts, role: Role) -> frozenset[Role]:
    return frozenset(Role) - {role} if facts.role_is_label else facts.switch_roles


def _observe_load(telemetry: Telemetry, server: WorkerServer, settings: Settings) -> None:
    labels = {"pool": settings.pool, "role": settings.role.value}
    capacity = server.condition.facts.kv_capacity_tokens if server.condition.facts else 1
    observe = telemetry.instruments.observe
    observe("pdgate_worker_running", lambda: [(server.condition.load.num_running, labels)])
    observe("pdgate_worker_waiting", lambda: [(server.condition.load.num_waiting, labels)])
    observe("pdgate_worker_kv_used", lambda: [(server.condition.load.kv_used_tokens / capacity, labels)])
    observe("pdgate_worker_progress_age_seconds", lambda: [(server.condition.progress_age_s, labels)])


def _bury_former_children() -> None:
    """Collect what an earlier life of this process started, killed and left as zombies when it began this one."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Read settings, build the engine before the loop starts, and run."""
    started_unix_ms = int(time.time() * 1000)
    inherited = dict(os.environ)  # before the engine adds its own, which name files of this life
    _bury_former_children()
    settings = from_env(Settings, "WORKER_", inherited)
    configure_logging("worker", level=settings.log_level, json=settings.log_json)
    structlog.contextvars.bind_contextvars(worker_id=settings.id)
    catalog = catalog_of(settings)
    context_tokens_of(catalog, settings.pool)
    revision = revision_of(settings)
    kv, experts = KvTable(revision), ExpertTable()
    first_prompts = read_first_prompts(settings.first_prompts, settings.model_path)
    engine = build_engine(settings, catalog, kv, experts, revision=revision)
    try:
        ending = uvloop.run(
            serve(
                settings,
                engine,
                catalog,
                kv,
                experts,
                revision=revision,
                started_unix_ms=started_unix_ms,
                first_prompts=first_prompts,
            )
        )
    except OSError as error:
        sys.exit(f"worker {settings.id}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    if ending.role is not None:
        # The same process, so that its supervisor sees no death: it is asked for, not a fault.
        variables = {**inherited, "WORKER_ROLE": ending.role.value}
        os.execve(sys.executable, [sys.executable, "-m", "workers"], variables)  # noqa: S606
    if settings.engine == "sglang":
        os._exit(ending.status)  # all is flushed and closed, and torch and Mooncake would take seconds to unload
    sys.exit(ending.status)
