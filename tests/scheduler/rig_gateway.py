"""A gateway without HTTP, for tests of the scheduler: what it submits, and what it sees of it."""

import asyncio
import itertools
import time
from contextlib import suppress

import grpc
import msgspec
from redis.asyncio import Redis

from contracts import keys
from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, Phase
from contracts.rating import Price
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
    RequestOutcome,
    Sampling,
    Submit,
    attempt_from_pb,
    decode_notice,
    encode,
    pack_ids,
    unpack_ids,
)

POOL = "tiny"
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

_token_ids = itertools.cycle(range(1000, 30_000))


class GatewayRequest:
    """What the gateway saw of one request."""

    def __init__(self, submit: Submit, entry_id: bytes) -> None:
        self.submit, self.entry_id = submit, entry_id
        self.notices: list[Notice] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.texts: dict[tuple[int, int], str] = {}
        self.finished: dict[tuple[int, int, Phase], pb.Finished] = {}
        self.notices_by_workers: list[Notice] = []

    @property
    def rid(self) -> str:
        return self.submit.rid

    def of(self, kind: type) -> list:
        return [n for n in self.notices if isinstance(n, kind)]

    @property
    def placed(self) -> list[Placed]:
        """By attempt, whichever way the notices came."""
        both = (*self.notices_by_workers, *self.of(Placed))
        found = {notice.attempt: notice for notice in both if isinstance(notice, Placed)}
        return [found[attempt] for attempt in sorted(found)]

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

    def attach(self, address: str) -> None:
        self._own.append(self._tasks.create_task(self._attach(address)))

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
            attempt = attempt_from_pb(opened.id)
            handles[opened.handle] = attempt, PHASE_FROM_PB[opened.phase]
            if opened.placed and attempt.rid in self.requests:
                self.requests[attempt.rid].notices_by_workers.append(decode_notice(opened.placed))
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
