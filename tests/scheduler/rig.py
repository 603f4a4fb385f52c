"""A pool in one process: real Valkey, real timed workers, real gRPC, a gateway that follows the rules."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import msgspec
from redis.asyncio import Redis

from contracts import keys
from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, HandOff, Phase, Role
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.rating import Price
from contracts.resp import redis_client
from contracts.slo import SloTarget
from contracts.units import NanoPerMillion
from contracts.v1 import worker_pb2 as pb
from contracts.v1.worker_pb2_grpc import WorkerStub
from contracts.wire import (
    FIELD,
    FINISH_FROM_PB,
    PHASE_FROM_PB,
    Abort,
    Attempt,
    AttemptLost,
    Continue,
    Notice,
    Owner,
    Placed,
    Refused,
    Registration,
    RequestOutcome,
    Sampling,
    Submit,
    attempt_from_pb,
    decode_notice,
    encode,
    pack_ids,
    unpack_ids,
)
from observability.metrics import Instruments
from observability.tracing import Tracer
from scheduler.helm import HelmSettings
from scheduler.policy.cluster import Limits
from scheduler.pool import PoolScheduler
from scheduler.profile import PoolProfile
from scheduler.settings import Settings, Timing
from workers.assignments import Identity
from workers.engines.faults import Faults
from workers.engines.timed import TimedEngine
from workers.heartbeat import Heartbeat
from workers.server import WorkerServer

POOL = "tiny"
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
PRICE = Price(
    version=1,
    model="tiny",
    prefill_computed=NanoPerMillion(100_000_000),
    prefill_cached=NanoPerMillion(20_000_000),
    decode=NanoPerMillion(400_000_000),
)
OWNER = Owner(
    org="org-1", project="project-1", key_id="key-1", model="tiny", tier="default", price=PRICE, slo=SloTarget()
)


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Wait until `condition()` is true; fail after DEADLINE_S."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - conditions over other people's state have no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"did not happen in {DEADLINE_S} s: {what or condition}") from None


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


class GatewayRequest:
    """What the gateway saw of one request."""

    def __init__(self, submit: Submit, entry_id: bytes) -> None:
        self.submit, self.entry_id = submit, entry_id
        self.notices: list[Notice] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.texts: dict[tuple[int, int], str] = {}
        self.finished: dict[tuple[int, int, Phase], pb.Finished] = {}

    @property
    def rid(self) -> str:
        return self.submit.rid

    def of(self, kind: type) -> list:
        return [n for n in self.notices if isinstance(n, kind)]

    @property
    def placed(self) -> list[Placed]:
        return self.of(Placed)

    @property
    def refused(self) -> list[Refused]:
        return self.of(Refused)

    @property
    def lost(self) -> list[AttemptLost]:
        return self.of(AttemptLost)

    def reason(self, attempt: int = 1, sample: int = 0) -> FinishReason | None:
        for phase in (Phase.DECODE, Phase.UNIFIED):
            found = self.finished.get((attempt, sample, phase))
            if found is not None:
                return FINISH_FROM_PB[found.reason]
        return None


class RigGateway:
    """A gateway without HTTP: lease, notices, Attach streams, acks, and what a test tells it to do."""

    def __init__(self, redis: Redis, gateway_id: str, tasks: asyncio.TaskGroup) -> None:
        self.redis, self.gateway_id = redis, gateway_id
        self.requests: dict[str, GatewayRequest] = {}
        self._tasks = tasks
        self._own: list[asyncio.Task] = []
        self._may_renew = asyncio.Event()
        self._may_renew.set()

    async def start(self) -> None:
        await self._renew()
        self._own += [self._tasks.create_task(self._lease()), self._tasks.create_task(self._notices())]

    def attach(self, worker: RigWorker) -> None:
        self._own.append(self._tasks.create_task(self._attach(worker.registration.address)))

    async def die(self) -> None:
        """Vanish: streams end, the lease is gone."""
        for task in self._own:
            task.cancel()
        await self.redis.delete(keys.gateway_lease(self.gateway_id))

    async def lose_lease(self) -> None:
        """Redis is out of reach for this gateway; its streams go on."""
        for task in self._own[:2]:
            task.cancel()
        await self.redis.delete(keys.gateway_lease(self.gateway_id))

    async def submit(self, prompt_tokens: int = 32, *, max_tokens: int = 8, deadline_s: float = 60.0, **fields):
        now_ms = int(time.time() * 1000)
        submit = Submit(
            rid=fields.pop("rid", None) or new_rid(now_ms),
            pool=POOL,
            gateway_id=self.gateway_id,
            owner=fields.pop("owner", OWNER),
            prompt=fields.pop("prompt", None) or pack_ids([next(_token_ids) for _ in range(prompt_tokens)]),
            sampling=Sampling(
                max_tokens=max_tokens,
                ignore_eos=True,
                **{name: fields.pop(name) for name in list(fields) if name in Sampling.__struct_fields__},
            ),
            deadline_unix_ms=now_ms + int(deadline_s * 1000),
            **fields,
        )
        entry_id = await self.write(submit)
        request = self.requests[submit.rid] = GatewayRequest(submit, entry_id)
        return request

    async def write(self, message: msgspec.Struct) -> bytes:
        return await self.redis.xadd(keys.inbox(POOL), {FIELD: encode(message)})

    async def abort(self, request: GatewayRequest) -> None:
        await self.write(Abort(rid=request.rid, reason="client_left"))

    async def start_again(self, request: GatewayRequest, lost_attempt: int) -> None:
        await self.write(Continue(rid=request.rid, lost_attempt=lost_attempt, delivered=()))

    async def go_on(self, request: GatewayRequest, lost_attempt: int, *, done: tuple[int, ...] = (), **changes) -> None:
        """Tell the scheduler what was delivered of all attempts up to `lost_attempt`."""
        samples, attempts = range(request.submit.num_samples), range(1, lost_attempt + 1)
        ids = [[i for a in attempts for i in request.tokens.get((a, s), [])] for s in samples]
        texts = ["".join(request.texts.get((a, s), "") for a in attempts) for s in samples]
        fields = {
            "delivered": tuple(pack_ids(sample) for sample in ids),
            "delivered_chars": tuple(len(text) for text in texts),
            **changes,
        }
        await self.write(Continue(rid=request.rid, lost_attempt=lost_attempt, done=done, **fields))

    async def finish(self, request: GatewayRequest, outcome: str = "finished", **seen) -> None:
        """What the gateway does after its settlement."""
        done = RequestOutcome(
            **{
                "rid": request.rid,
                "model": "tiny",
                "tier": request.submit.owner.tier,
                "outcome": outcome,
                "timings": None,
                "slo_met": None,
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "completion_tokens": 0,
                "path": None,
                **seen,
            }
        )
        await self.redis.xadd(keys.outcomes(POOL), {FIELD: encode(done)})
        await self.redis.xack(keys.inbox(POOL), keys.CONSUMER_GROUP_SCHEDULER, request.entry_id)
        await self.redis.xdel(keys.inbox(POOL), request.entry_id)
        await self.redis.delete(keys.inflight(POOL, request.rid))

    async def _renew(self) -> None:
        await self.redis.set(keys.gateway_lease(self.gateway_id), b"1", px=3000)

    def pause_lease(self) -> asyncio.Event:
        """Stop renewing until the returned event is set."""
        self._may_renew = asyncio.Event()
        return self._may_renew

    async def _lease(self) -> None:
        while True:
            await self._may_renew.wait()
            await self._renew()
            await asyncio.sleep(0.5)

    async def _notices(self) -> None:
        last = b"0-0"
        while True:
            for _, rows in await self.redis.xread({keys.notices(self.gateway_id): last}, block=1000) or ():
                for entry_id, fields in rows:
                    last = entry_id
                    notice = decode_notice(fields[FIELD.encode()])
                    if notice.rid in self.requests:
                        self.requests[notice.rid].notices.append(notice)

    async def _attach(self, address: str) -> None:
        with suppress(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(address) as channel:
                call = WorkerStub(channel).Attach()
                await call.write(pb.AttachCommand(hello=pb.AttachHello(gateway_id=self.gateway_id, v=1)))
                handles: dict[int, tuple[Attempt, Phase]] = {}
                while isinstance(batch := await call.read(), pb.StepBatch):
                    self._take(batch, handles)
                    await call.write(pb.AttachCommand(ack=pb.Ack(seq=batch.seq)))

    def _take(self, batch: pb.StepBatch, handles: dict[int, tuple[Attempt, Phase]]) -> None:
        for opened in batch.opened:
            handles[opened.handle] = attempt_from_pb(opened.id), PHASE_FROM_PB[opened.phase]
        ids, at = unpack_ids(batch.token_ids), 0
        for handle, text, length in zip(batch.handle, batch.text, batch.num_tokens, strict=True):
            attempt, _ = handles[handle]
            if attempt.rid in self.requests:
                texts = self.requests[attempt.rid].texts
                texts[attempt.attempt, attempt.sample] = texts.get((attempt.attempt, attempt.sample), "") + text
                tokens = self.requests[attempt.rid].tokens.setdefault((attempt.attempt, attempt.sample), [])
                tokens += ids[at : at + length]
            at += length
        for finished in batch.finished:
            attempt, phase = handles[finished.handle]
            if attempt.rid in self.requests:
                self.requests[attempt.rid].finished[attempt.attempt, attempt.sample, phase] = finished


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
        server = WorkerServer(identity, role, engine)
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
            capabilities=("probe",) if facts.pop("probes", False) else (),
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
                gateway.attach(worker)
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
            gateway.attach(worker)
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
_token_ids = itertools.cycle(range(1000, 30_000))


@asynccontextmanager
async def running_rig(redis_url: str) -> AsyncIterator[Rig]:
    async with redis_client(redis_url) as redis, asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        rig = Rig(redis, redis_url, tasks, stack)
        yield rig
        await rig.stop_all()
