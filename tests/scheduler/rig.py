"""A pool in one process: real Valkey, real timed workers, real gRPC, a gateway that follows the rules."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
from redis.asyncio import Redis

from contracts.lifecycle import HandOff, RequestState, Role
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.resp import redis_client
from contracts.wire import (
    Attempt,
    Registration,
)
from observability.metrics import Instruments
from observability.tracing import Tracer
from scheduler.fleet.protocol import Fleet
from scheduler.helm import HelmSettings
from scheduler.policy.cluster import Limits
from scheduler.pool import PoolScheduler
from scheduler.profile import PoolProfile
from scheduler.settings import Settings, Timing
from tests.scheduler.rig_gateway import POOL, GatewayRequest, RigGateway
from workers.assignments import Identity
from workers.engines.faults import Faults
from workers.engines.timed import TimedEngine
from workers.heartbeat import Heartbeat
from workers.server import WorkerServer

DEADLINE_S = 20.0
FAST = LatencyModel(
    prefill=PrefillCost(fixed_ms=1.0, per_token_ms=0.01),
    decode=DecodeCost(fixed_ms=2.0),
    transfer=TransferCost(fixed_ms=1.0, bytes_per_ms=1e6, kv_bytes_per_token=1024),
    kv_capacity_tokens=20_000,
    max_running=64,
)
SLOW_PREFILL = msgspec.structs.replace(FAST, prefill=PrefillCost(fixed_ms=60_000.0, per_token_ms=0.0))
SLOW_DECODE = msgspec.structs.replace(FAST, decode=DecodeCost(fixed_ms=50.0))
TIMING = Timing(
    discover_s=0.05,
    gateway_poll_s=0.1,
    gateway_dead_after_s=0.5,
    outcome_poll_s=0.05,
    tick_s=0.05,
    hand_back_after_s=3600.0,
)


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Wait until `condition()` is true; fail after DEADLINE_S."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - conditions over other people's state have no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"did not happen in {DEADLINE_S} s: {what or condition}") from None


def state_of(pool: PoolScheduler, request: GatewayRequest) -> RequestState | None:
    """Return where the leader sees a request; None = it has not read it, or has forgotten it."""
    found = pool.term.book.get(request.rid)
    return found.state if found is not None else None


async def all_ends_heard(pool: PoolScheduler) -> None:
    """Wait until the scheduler knows of every end that gateways may have seen: it hears them on another path."""
    await eventually(lambda: not any(w.num_requests for w in pool.registry.workers()), "all ends are heard")


class RigWorker:
    """A timed worker with a lease."""

    def __init__(self, server: WorkerServer, engine: TimedEngine, faults: Faults, registration: Registration) -> None:
        self.server, self.engine, self.faults = server, engine, faults
        self._registered = registration
        self.tasks: list[asyncio.Task] = []
        self.dead = False
        self.submitted: list[Attempt] = []
        original = engine.submit

        def submit(job, outlet):
            self.submitted.append(job.attempt)
            original(job, outlet)

        engine.submit = submit

    @property
    def registration(self) -> Registration:
        """What the lease says now: role, state and epoch are those in force."""
        condition = self.server.condition
        return msgspec.structs.replace(
            self._registered,
            epoch=condition.identity.epoch,
            role=condition.role,
            state=condition.state,
            bootstrap_host=condition.facts.bootstrap_host,
            bootstrap_port=condition.facts.bootstrap_port,
        )

    @property
    def worker_id(self) -> str:
        return self._registered.worker_id

    @property
    def epoch(self) -> int:
        return self.registration.epoch

    @property
    def running(self) -> int:
        return len(self.server.assignments)

    async def kill(self) -> None:
        """Vanish without a word; the lease stays until it expires."""
        if self.dead:
            return
        self.dead = True
        await self.server._server.stop(grace=None)
        for task in self.tasks:
            task.cancel()

    async def cut_control(self) -> None:
        """End every Control stream of this worker, as a reset would."""
        for stream in list(self.server._control._streams):
            stream.close()


class Rig:
    """The pool."""

    def __init__(self, redis: Redis, redis_url: str, tasks: asyncio.TaskGroup, stack: AsyncExitStack) -> None:
        self.redis, self.redis_url = redis, redis_url
        self.workers: list[RigWorker] = []
        self.gateways: list[RigGateway] = []
        self._tasks, self._stack = tasks, stack
        self._schedulers: dict[PoolScheduler, asyncio.Task] = {}

    async def worker(
        self, role: Role, latency: LatencyModel = FAST, *, worker_id: str = "", attach: bool = True, **facts
    ) -> RigWorker:
        """Start a worker; every gateway attaches to it unless told otherwise."""
        faults = Faults()
        engine = TimedEngine(
            latency,
            faults=faults,
            hand_off_timeout_s=facts.pop("hand_off_timeout_s", 5.0),
            hand_off=facts.pop("hand_off", HandOff.DIRECT),
            store=facts.pop("store", None),
            switch_s=0.01,
            restart_s=0.05,
        )
        worker_id = worker_id or f"{role}-{len(self.workers)}"
        identity = Identity(worker_id=worker_id, epoch=next(_epochs), pool=POOL)
        server = WorkerServer(identity, role, engine, sleeper=engine if latency.weights is not None else None)
        address = await server.start("127.0.0.1:0")
        known = server.condition.facts
        registration = Registration(
            worker_id=worker_id,
            epoch=identity.epoch,
            pid=0,
            address=address,
            pool=POOL,
            role=role,
            state=server.condition.state,
            engine="timed",
            simulated=True,
            model_path="tiny",
            model_revision=facts.pop("model_revision", "r1"),
            dtype=known.dtype,
            kv_dtype=facts.pop("kv_dtype", known.kv_dtype),
            page_size=facts.pop("page_size", known.page_size),
            tp_size=1,
            dp_size=1,
            transfer_backend=known.transfer_backend,
            bootstrap_host=known.bootstrap_host,
            bootstrap_port=known.bootstrap_port,
            kv_capacity_tokens=known.kv_capacity_tokens,
            max_running=facts.pop("max_running", known.max_running),
            context_tokens=facts.pop("context_tokens", 4096),
            hand_offs=known.hand_offs,
            latency=known.latency,
            catalog_revision="",
            zone=facts.pop("zone", ""),
            capabilities=(("probe",) if facts.pop("probes", False) else ()) + (("sleep",) if known.sleeps else ()),
            started_unix_ms=identity.epoch,
        )
        assert not facts
        worker = RigWorker(server, engine, faults, registration)
        worker.tasks = [self._tasks.create_task(server.run())]
        self.beat(worker)
        self._stack.push_async_callback(worker.kill)
        self.workers.append(worker)
        if attach:
            for gateway in self.gateways:
                gateway.attach(worker.registration.address)
        return worker

    def beat(self, worker: RigWorker) -> None:
        """Start a worker's heartbeat."""
        heartbeat = Heartbeat(self.redis, lambda: worker.registration)
        worker.server.condition.on_change = heartbeat.renew_soon
        worker.tasks[1:] = [self._tasks.create_task(heartbeat.run())]

    async def pair(self, latency: LatencyModel = FAST) -> tuple[RigWorker, RigWorker]:
        return await self.worker(Role.PREFILL, latency), await self.worker(Role.DECODE, latency)

    async def gateway(self, gateway_id: str = "") -> RigGateway:
        """Start a gateway that is attached to every worker there is."""
        gateway = RigGateway(self.redis, gateway_id or f"gw-{len(self.gateways)}", self._tasks)
        self.gateways.append(gateway)
        await gateway.start()
        self._stack.push_async_callback(gateway.die)
        for worker in self.workers:
            gateway.attach(worker.registration.address)
        return gateway

    def scheduler(
        self,
        scheduler_id: str = "",
        *,
        limits: Limits | None = None,
        timing: Timing = TIMING,
        profile: PoolProfile | None = None,
        helm: HelmSettings | None = None,
        instruments: Instruments | None = None,
        fleet: Fleet | None = None,
    ):
        """Start a scheduler of the pool."""
        settings = Settings(
            redis_url=self.redis_url, catalog="", id=scheduler_id or f"s-{len(self._schedulers)}", dead_after_s=3.0
        )
        redis = redis_client(self.redis_url)
        self._stack.push_async_callback(redis.aclose)
        pool = PoolScheduler(
            redis,
            POOL,
            settings=settings,
            instruments=instruments or Instruments(),
            tracer=Tracer("scheduler", "test"),
            profile=profile,
            limits=limits,
            timing=timing,
            helm=helm,
            fleet=fleet,
        )
        self._schedulers[pool] = self._tasks.create_task(pool.run())
        return pool

    async def leading(self, pool: PoolScheduler) -> PoolScheduler:
        """Wait until this scheduler leads and every worker is up."""
        await eventually(lambda: pool.term is not None and pool.term.attempts.caught_up, "leading")
        await eventually(
            lambda: (
                len(list(pool.registry.workers())) == len(self.workers)
                and all(w.ready for w in pool.registry.workers())
            ),
            "workers up",
        )
        return pool

    async def kill(self, pool: PoolScheduler) -> None:
        """End a scheduler without letting it give its lease up."""
        pool.lease._renew = _nothing
        self._schedulers[pool].cancel()
        with suppress(asyncio.CancelledError):
            await self._schedulers[pool]

    async def stop_all(self) -> None:
        for task in self._schedulers.values():
            task.cancel()
        if self._schedulers:
            _done, pending = await asyncio.wait(self._schedulers.values(), timeout=DEADLINE_S)
            assert not pending, "a cancelled scheduler did not end"


async def _nothing(**_) -> int:
    return 1


_epochs = itertools.count(int(time.time() * 1000))


@asynccontextmanager
async def running_rig(redis_url: str) -> AsyncIterator[Rig]:
    async with redis_client(redis_url) as redis, asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        rig = Rig(redis, redis_url, tasks, stack)
        yield rig
        await rig.stop_all()
