"""A real gateway over HTTP, with peers that a test plays by hand.

The gateway is the whole application behind its HTTP server, on the test's loop. `PeerWorker` is a real gRPC server
of the worker's protocol that streams what the test says; `PeerScheduler` reads the real inbox and
writes real notices.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import create_async_engine

from billing.prices import sync_catalog
from contracts import keys
from contracts.catalog import Catalog
from contracts.environment import asyncpg_url
from contracts.identity import shard_of
from contracts.lifecycle import FinishReason, HandOff, Phase, Role, WorkerState
from contracts.lifecycle import Path as RequestPath
from contracts.usage import UsageEvent
from contracts.v1 import worker_pb2 as pb
from contracts.v1 import worker_pb2_grpc
from contracts.wire import (
    FIELD,
    FINISH_TO_PB,
    PHASE_TO_PB,
    AttemptLost,
    Counts,
    InboxEntry,
    Placed,
    Refused,
    Registration,
    RequestOutcome,
    Submit,
    WorkerRef,
    attempt_to_pb,
    counts_to_pb,
    decode_inbox,
    encode,
    pack_ids,
)
from contracts.wire import Attempt as AttemptName
from gateway.app import Gateway, create_app
from gateway.http_server import http_server
from gateway.limits import NO_LIMITS, Limits
from gateway.records import Records
from gateway.settings import Settings
from gateway.tenants import ApiKey, Organisation, Project, Tenants, publish_key_state
from gateway.traces import Traces
from observability.metrics import Instruments
from observability.tracing import Ratios, Tracer
from tests.processes import free_port

POOL = "tiny"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


class SilentTelemetry:
    """Instruments of one gateway, without the process' own figures."""

    def __init__(self) -> None:
        self.instruments = Instruments()

    def exposition(self, _: str = "") -> tuple[bytes, str]:
        return b"", "text/plain"


def silent_records() -> Records:
    """Records of a gateway that nobody scrapes or traces."""
    untraced = Traces(Tracer("gateway", "test"), Ratios(otherwise=0, by_tier={}))
    return Records(SilentTelemetry().instruments, untraced)


async def eventually(check: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Return what `check` (plain or async) gives as soon as it is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = check()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.01)


class PeerHealth(health_pb2_grpc.HealthServicer):
    """Counts how often a peer worker was asked for its health."""

    def __init__(self, worker: "PeerWorker") -> None:
        self._worker = worker

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802 - the proto's name
        self._worker.num_checks += 1
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class PeerWorker(worker_pb2_grpc.WorkerServicer):
    """A worker whose batches the test writes."""

    def __init__(self, worker_id: str, role: Role, *, epoch: int = 1) -> None:
        self.worker_id = worker_id
        self.role = role
        self.epoch = epoch
        self.address = ""
        self.hellos: list[pb.AttachHello] = []
        self.aborts: list[pb.Abort] = []
        self.acked = 0
        self.num_checks = 0
        self._sent: list[pb.StepBatch] = []
        self._handles = itertools.count(1)
        self._news = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(PeerHealth(self), self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(worker_id=self.worker_id, epoch=self.epoch, address=self.address)

    def registration(self) -> Registration:
        return Registration(
            worker_id=self.worker_id,
            epoch=self.epoch,
            pid=1,
            address=self.address,
            pool=POOL,
            role=self.role,
            state=WorkerState.READY,
            engine="timed",
            simulated=True,
            model_path="tiny",
            model_revision="r",
            dtype="float32",
            kv_dtype="float32",
            page_size=1,
            tp_size=1,
            dp_size=1,
            transfer_backend="none",
            bootstrap_host="127.0.0.1",
            bootstrap_port=1,
            kv_capacity_tokens=100_000,
            max_running=256,
            context_tokens=2048,
            hand_offs=(HandOff.DIRECT,),
            catalog_revision="c",
            started_unix_ms=1,
        )

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 - the proto's name
        commands = aiter(request_iterator)
        hello = (await anext(commands)).hello
        self.hellos.append(hello)
        position = hello.last_seq if hello.worker_epoch == self.epoch else 0
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(commands))
            while not reading.done():
                async with self._news:
                    await self._news.wait_for(lambda: len(self._sent) > position or reading.done())  # noqa: B023
                    new = self._sent[position:]
                for batch in new:
                    await context.write(batch)
                position += len(new)

    async def _read(self, commands: AsyncIterator[pb.AttachCommand]) -> None:
        try:
            async for command in commands:
                match command.WhichOneof("command"):
                    case "ack":
                        self.acked = max(self.acked, command.ack.seq)
                    case "abort":
                        self.aborts.append(command.abort)
        finally:
            async with self._news:
                self._news.notify_all()

    async def send(self, **columns: Any) -> int:
        """Send one batch and return its sequence number."""
        batch = pb.StepBatch(seq=len(self._sent) + 1, worker_epoch=self.epoch, v=1, **columns)
        async with self._news:
            self._sent.append(batch)
            self._news.notify_all()
        return batch.seq

    async def open(
        self, rid: str, phase: Phase, *, attempt: int = 1, sample: int = 0, placed: Placed | None = None
    ) -> "Handle":
        """Announce one engine request, with the notice of its placement if there is one."""
        handle = next(self._handles)
        opened = pb.Opened(
            handle=handle,
            id=attempt_to_pb(AttemptName(rid, attempt, sample)),
            phase=PHASE_TO_PB[phase],
            placed=encode(placed) if placed is not None else b"",
        )
        await self.send(opened=[opened])
        return Handle(self, handle)


class Handle:
    """One engine request on a peer worker."""

    def __init__(self, worker: PeerWorker, handle: int) -> None:
        self._worker = worker
        self.handle = handle

    async def tokens(self, *texts: str) -> int:
        """Send one batch with one token per text."""
        return await self._worker.send(
            handle=[self.handle] * len(texts),
            text=texts,
            num_tokens=[1] * len(texts),
            token_ids=pack_ids(range(len(texts))),
        )

    async def finish(self, reason: FinishReason, *, prompt: int = 0, cached: int = 0, completion: int = 0) -> int:
        """Send the end with the final counts."""
        counts = Counts(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
        finished = pb.Finished(handle=self.handle, reason=FINISH_TO_PB[reason], counts=counts_to_pb(counts))
        return await self._worker.send(finished=[finished])


def placed_on(
    submit: Submit, *, decode: PeerWorker, prefill: PeerWorker | None = None, attempt: int = 1, **fields: Any
) -> Placed:
    """Return the notice of a placement."""
    return Placed(
        rid=submit.rid,
        attempt=attempt,
        path=RequestPath.PD if prefill else RequestPath.UNIFIED,
        hand_off=HandOff.DIRECT if prefill else None,
        decode=decode.ref,
        prefill=prefill.ref if prefill else None,
        **fields,
    )


class PeerScheduler:
    """Reads the inbox and writes notices, as the test says."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._last_id: Any = "0"
        self._unread: list[InboxEntry] = []

    async def next(self, timeout_s: float = 5.0) -> InboxEntry:
        """Return the next inbox entry."""
        while not self._unread:
            answer = await self._redis.xread({keys.inbox(POOL): self._last_id}, block=int(timeout_s * 1000))
            if not answer:
                raise TimeoutError("no inbox entry came")
            rows = next(iter(answer.values()))[0] if isinstance(answer, dict) else answer[0][1]
            for entry_id, fields in rows:
                self._last_id = entry_id
                self._unread.append(decode_inbox(fields[FIELD.encode()]))
        return self._unread.pop(0)

    async def submit(self) -> Submit:
        """Return the next inbox entry, which is a new request."""
        entry = await self.next()
        assert isinstance(entry, Submit), entry
        return entry

    async def placed(
        self, submit: Submit, *, decode: PeerWorker, prefill: PeerWorker | None = None, attempt: int = 1
    ) -> None:
        await self._notify(submit, placed_on(submit, decode=decode, prefill=prefill, attempt=attempt))

    async def refused(self, submit: Submit, code: str, message: str, retry_after_s: float | None = None) -> None:
        await self._notify(submit, Refused(rid=submit.rid, code=code, message=message, retry_after_s=retry_after_s))

    async def lost(self, submit: Submit, *, attempt: int = 1, retrying: bool) -> None:
        await self._notify(submit, AttemptLost(rid=submit.rid, attempt=attempt, cause="worker_lost", retrying=retrying))

    async def _notify(self, submit: Submit, notice: msgspec.Struct) -> None:
        await self._redis.xadd(keys.notices(submit.gateway_id), {FIELD: encode(notice)})


class Rig:
    """A running gateway, a tenant, a prefill and a decode worker, and their scheduler."""

    def __init__(self, gateway: Gateway, redis: Redis, tenants: Tenants, client: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.redis = redis
        self.tenants = tenants
        self.client = client
        self.scheduler = PeerScheduler(redis)
        self.prefill = PeerWorker("prefill-0", Role.PREFILL)
        self.decode = PeerWorker("decode-0", Role.DECODE)
        self.org: Organisation
        self.project: Project
        self.key: ApiKey
        self.secret = ""

    async def tenant(self, *, limits: Limits = NO_LIMITS, org_limits: Limits = NO_LIMITS) -> str:
        """Create an organisation with a project and a key, use the key from here on, and return it."""
        self.org = await self.tenants.create_organisation("Test", limits=org_limits)
        self.project = await self.tenants.create_project(self.org.id, "Default")
        self.key, self.secret = await self.tenants.create_key(self.org.id, self.project.id, "test", limits=limits)
        await publish_key_state(self.redis, self.key)
        self.client.headers["authorization"] = f"Bearer {self.secret}"
        return self.secret

    async def register(self, *workers: PeerWorker, lease_ms: int = 600_000) -> None:
        """Give workers a lease and wait until the gateway is attached to them."""
        for worker in workers:
            await self.redis.zadd(keys.pool_workers(POOL), {worker.worker_id: 9e15})
            lease = keys.worker_lease(POOL, worker.worker_id)
            await self.redis.set(lease, encode(worker.registration()), px=lease_ms)
        await eventually(lambda: all(self.gateway.fleet.attached(worker.worker_id) for worker in workers))

    async def unregister(self, worker: PeerWorker) -> None:
        await self.redis.zrem(keys.pool_workers(POOL), worker.worker_id)
        await self.redis.delete(keys.worker_lease(POOL, worker.worker_id))

    async def usage(self, rid: str) -> UsageEvent:
        """Return the usage event of a request once it is settled and everything about it is cleared."""
        org = self.org.id

        async def settled() -> UsageEvent | None:
            raw = await self.redis.get(keys.settled_request(org, rid))
            left = await self.redis.exists(keys.reservation(org, rid), keys.inflight(POOL, rid))
            entries = [decode_inbox(fields[FIELD.encode()]) for _, fields in await self.redis.xrange(keys.inbox(POOL))]
            left = left or any(isinstance(entry, Submit) and entry.rid == rid for entry in entries)
            return msgspec.msgpack.decode(raw, type=UsageEvent) if raw and not left else None

        event: UsageEvent = await eventually(settled)
        return event

    async def outcomes(self) -> list[RequestOutcome]:
        rows = await self.redis.xrange(keys.outcomes(POOL))
        return [msgspec.msgpack.decode(fields[FIELD.encode()], type=RequestOutcome) for _, fields in rows]

    async def nothing_queued_or_reserved(self) -> bool:
        """Return whether neither the inbox nor the organisation's shard holds anything of a request.

        The entry of one that is settled may stay for `FINISH_WITHIN_S`, and the last one may be settled right now.
        """
        shard = shard_of(self.org.id)
        for _ in range(40):
            queued = await self.redis.xlen(keys.inbox(POOL))
            reserved = await self.redis.zcard(keys.open_reservations_of_shard(shard))
            if queued == reserved == 0:
                return True
            await asyncio.sleep(0.05)
        return False


@asynccontextmanager
async def running_rig(
    *,
    redis_url: str,
    database_url: str,
    catalog_file: Path,
    catalog: Catalog,
    models_dir: Path,
    journal_dir: Path,
    **changes: Any,
) -> AsyncIterator[Rig]:
    """Run a gateway with the fixtures' services. `changes` replace settings."""
    port = free_port()
    fields = {
        "redis_url": redis_url,
        "database_url": database_url,
        "catalog": catalog_file,
        "models_dir": models_dir,
        "journal_dir": journal_dir,
        "listen": f"127.0.0.1:{port}",
        "discovery_s": 0.05,
        "request_timeout_s": 30.0,
        **changes,
    }
    settings = Settings(**fields)
    engine = create_async_engine(asyncpg_url(database_url))
    async with engine.begin() as connection:
        await sync_catalog(connection, catalog)
    redis = Redis.from_url(redis_url)
    telemetry: Any = SilentTelemetry()
    gateway = Gateway(settings, catalog, telemetry, gateway_id=f"gw-{port}")
    server = http_server(create_app(gateway, telemetry), settings)
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20)
    rig = Rig(gateway, redis, Tenants(engine), client)
    async with gateway.running(), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve())
        try:
            await rig.tenant()
            await rig.prefill.start()
            await rig.decode.start()
            await rig.register(rig.prefill, rig.decode)
            await eventually(lambda: not gateway.models.missing("tiny"))
            yield rig
        finally:
            await client.aclose()
            gateway.stop_streams()
            server.stop()
            async with asyncio.timeout(10):
                await serving
            await rig.prefill.stop()
            await rig.decode.stop()
            await redis.aclose()
            await engine.dispose()


def events_of(body: str) -> list[Any]:
    """Return the events of an SSE body: decoded JSON, or the text `[DONE]`. Comments are left out."""
    found: list[Any] = []
    for block in body.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
