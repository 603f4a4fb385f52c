"""Workers in this process on real gRPC ports, and the two clients that talk to them."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio

from contracts.identity import new_rid, new_room
from contracts.lifecycle import FinishReason, Phase, Role
from contracts.parsing import Detail, TokenLogprob, detail_from_pb, parsing_to_pb
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.v1 import worker_pb2 as pb
from contracts.v1 import worker_pb2_grpc
from contracts.wire import (
    FINISH_FROM_PB,
    PHASE_TO_PB,
    Attempt,
    Sampling,
    attempt_from_pb,
    attempt_to_pb,
    pack_ids,
    sampling_to_pb,
    unpack_ids,
)
from gateway.samples import Sample
from workers.assignments import Identity
from workers.engines.faults import Faults
from workers.engines.timed import TimedEngine
from workers.outbox import Limits
from workers.server import WorkerServer

DEADLINE_S = 20.0
FAST = LatencyModel(
    prefill=PrefillCost(fixed_ms=1.0, per_token_ms=0.01),
    decode=DecodeCost(fixed_ms=2.0),
    transfer=TransferCost(fixed_ms=1.0, bytes_per_ms=1e6, kv_bytes_per_token=1024),
    kv_capacity_tokens=20_000,
    max_running=64,
)


class Worker:
    """A worker in this process: its server, its engine and its address."""

    def __init__(self, server: WorkerServer, engine: TimedEngine, address: str, faults: Faults) -> None:
        self.server = server
        self.engine = engine
        self.address = address
        self.faults = faults

    @property
    def epoch(self) -> int:
        return self.server.condition.identity.epoch

    @property
    def bootstrap(self) -> tuple[str, int]:
        facts = self.server.condition.facts
        return facts.bootstrap_host, facts.bootstrap_port


_epochs = itertools.count(int(time.time() * 1000))


@asynccontextmanager
async def running_worker(role: Role, latency: LatencyModel = FAST, **options) -> AsyncIterator[Worker]:
    faults = Faults()
    hand_off_timeout_s = options.pop("hand_off_timeout_s", 5.0)
    engine = TimedEngine(latency, hand_off_timeout_s=hand_off_timeout_s, faults=faults, kv=options.get("kv"))
    identity = Identity(worker_id=f"w-{role}", epoch=next(_epochs), pool="tiny")
    sleeper = engine if latency.weights is not None else None
    server = WorkerServer(identity, role, engine, **{"sleeper": sleeper, **options})
    address = await server.start("127.0.0.1:0")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.run())
        try:
            yield Worker(server, engine, address, faults)
        finally:
            task.cancel()
            await server.stop()


class Answer:
    """What a gateway collected of one engine request."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.num_chunks = 0
        self.details: list[Detail] = []
        self.finished: pb.Finished | None = None

    @property
    def reason(self) -> FinishReason:
        return FINISH_FROM_PB[self.finished.reason]

    @property
    def reasoning(self) -> str:
        return "".join(detail.reasoning for detail in self.details)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [token for detail in self.details for token in detail.logprobs]

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of each tool call."""
        sample = Sample()
        for detail in self.details:
            sample.detailed("", detail)
        return [(call.name, call.arguments) for call in sample.tool_calls]


class Gateway:
    """A gateway's Attach stream that collects everything; `ack` by hand or after every batch."""

    def __init__(self, address: str, *, gateway_id: str = "gw", auto_ack: bool = True) -> None:
        self.gateway_id = gateway_id
        self.answers: dict[tuple[Attempt, int], Answer] = {}
        self.batches: list[pb.StepBatch] = []
        self.last_seq = 0
        self._address = address
        self._auto_ack = auto_ack
        self._taking = True
        self._handles: dict[int, Answer] = {}
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._channel: grpc.aio.Channel | None = None
        self._call = None
        self._reader: asyncio.Task | None = None

    async def attach(self, tasks: asyncio.TaskGroup, *, epoch: int, last_seq: int | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(self._address)
        self._call = worker_pb2_grpc.WorkerStub(self._channel).Attach()
        last_seq = self.last_seq if last_seq is None else last_seq
        hello = pb.AttachHello(gateway_id=self.gateway_id, worker_epoch=epoch, last_seq=last_seq, v=1)
        await self._call.write(pb.AttachCommand(hello=hello))
        self._reader = tasks.create_task(self._read(self._call))

    async def detach(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await self._channel.close()

    def stop_taking(self) -> int:
        """Take and acknowledge no further batch; return the last one taken."""
        self._taking = False
        return self.last_seq

    async def ack(self, seq: int) -> None:
        await self._write(pb.AttachCommand(ack=pb.Ack(seq=seq)))

    async def _write(self, command: pb.AttachCommand) -> None:
        async with self._writing:  # grpc.aio takes one write at a time
            await self._call.write(command)

    async def abort(self, attempt: Attempt, *, all_samples: bool = False) -> None:
        abort = pb.Abort(id=attempt_to_pb(attempt), all_samples=all_samples, reason="test")
        await self._write(pb.AttachCommand(abort=abort))

    async def until(self, condition: Callable[[], bool], *, within_s: float = DEADLINE_S) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def answer(self, attempt: Attempt, phase: Phase = Phase.UNIFIED, *, within_s: float = DEADLINE_S) -> Answer:
        """Wait for the whole answer of a request."""
        key = (attempt, PHASE_TO_PB[phase])
        await self.until(lambda: key in self.answers and self.answers[key].finished is not None, within_s=within_s)
        return self.answers[key]

    async def _read(self, call) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for batch in call:
                if not self._taking:
                    continue
                self._take(batch)
                if self._auto_ack:
                    await self.ack(batch.seq)
                self._changed.set()

    def _take(self, batch: pb.StepBatch) -> None:
        self.batches.append(batch)
        self.last_seq = batch.seq
        for opened in batch.opened:
            key = (attempt_from_pb(opened.id), opened.phase)
            self._handles[opened.handle] = self.answers[key] = Answer()
        for detail in batch.details:
            self._handles[batch.handle[detail.entry]].details.append(detail_from_pb(detail))
        ids, at = unpack_ids(batch.token_ids), 0
        for handle, text, length in zip(batch.handle, batch.text, batch.num_tokens, strict=True):
            answer = self._handles[handle]
            answer.text += text
            answer.ids += ids[at : at + length]
            answer.num_chunks += 1
            at += length
        for finished in batch.finished:
            self._handles[finished.handle].finished = finished


class Leader:
    """A scheduler's Control stream that keeps every report, coalesced ones unpacked."""

    def __init__(self, address: str, *, epoch: int = 1, scheduler_id: str = "s1") -> None:
        self.epoch = epoch
        self.reports: list[pb.ControlReport] = []
        self._scheduler_id = scheduler_id
        self._writing = asyncio.Lock()
        self._channel = grpc.aio.insecure_channel(address)
        self._call = worker_pb2_grpc.WorkerStub(self._channel).Control()
        self._changed = asyncio.Event()
        self._reader: asyncio.Task | None = None

    async def open(self, tasks: asyncio.TaskGroup) -> pb.Inventory:
        hello = pb.Hello(scheduler_id=self._scheduler_id, leader_epoch=self.epoch, v=1)
        await self.send(hello=hello)
        self._reader = tasks.create_task(self._read())
        return await self.next_of("inventory", lambda _: True)

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await self._channel.close()

    async def send(self, **command) -> None:
        async with self._writing:
            await self._call.write(pb.ControlCommand(**command))

    def of(self, kind: str) -> list:
        return [getattr(r, kind) for r in self.reports if r.WhichOneof("report") == kind]

    async def next_of(self, kind: str, wanted: Callable[[object], bool]):
        """Wait for a report of a kind that is wanted, among those that came already too."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for report in self.of(kind):
                    if wanted(report):
                        return report
                self._changed.clear()
                await self._changed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the reports make a condition true."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def final(self, attempt: Attempt, phase: Phase = Phase.UNIFIED) -> pb.Final:
        number = PHASE_TO_PB[phase]
        return await self.next_of("final", lambda f: attempt_from_pb(f.id) == attempt and f.phase == number)

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for report in self._call:
                self.reports += [report, *report.also]
                self._changed.set()


def submit_of(
    worker: Worker,
    prompt: list[int],
    *,
    attempt: Attempt | None = None,
    phase: Phase = Phase.UNIFIED,
    epoch: int = 1,
    gateway_id: str = "gw",
    deadline_s: float = 60.0,
    **fields,
) -> pb.Submit:
    """A valid Submit for `worker`; sampling fields and Submit fields override by name."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in Sampling.__struct_fields__}
    if (parsing := fields.pop("parsing", None)) is not None:
        fields["parsing"] = parsing_to_pb(parsing)
    return pb.Submit(
        id=attempt_to_pb(attempt or Attempt(new_rid(int(time.time() * 1000)), 1)),
        leader_epoch=epoch,
        worker_epoch=fields.pop("worker_epoch", worker.epoch),
        phase=PHASE_TO_PB[phase],
        gateway_id=gateway_id,
        deadline_unix_ms=int((time.time() + deadline_s) * 1000),
        prompt=pack_ids(prompt),
        sampling=sampling_to_pb(Sampling(**{"max_tokens": 16, **sampling})),
        hand_off="" if phase is Phase.UNIFIED else "direct",
        **fields,
    )


def prompt_of(num_tokens: int) -> list[int]:
    return list(range(num_tokens))


def new_attempt(number: int = 1, sample: int = 0) -> Attempt:
    return Attempt(new_rid(int(time.time() * 1000)), number, sample)


def pair_submits(prefill: Worker, decode: Worker, prompt: list[int], attempt: Attempt, **fields):
    """Both halves of one PD request: (prefill's, decode's)."""
    host, port = prefill.bootstrap
    both = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": new_room(), **fields}
    return (
        submit_of(prefill, prompt, attempt=attempt, phase=Phase.PREFILL, **both),
        submit_of(decode, prompt, attempt=attempt, phase=Phase.DECODE, **both),
    )


class Bench:
    """A unified worker with a gateway and a leader attached."""

    def __init__(self, worker: Worker, gateway: Gateway, leader: Leader, tasks: asyncio.TaskGroup) -> None:
        self.worker, self.gateway, self.leader, self.tasks = worker, gateway, leader, tasks

    async def submit(self, prompt: list[int], **fields) -> Attempt:
        attempt = fields.pop("attempt", None) or new_attempt()
        await self.leader.send(submit=submit_of(self.worker, prompt, attempt=attempt, **fields))
        return attempt


@asynccontextmanager
async def unified_bench(
    latency: LatencyModel = FAST, *, auto_ack: bool = True, limits: Limits | None = None, **options
) -> AsyncIterator[Bench]:
    async with running_worker(Role.UNIFIED, latency, limits=limits, **options) as worker, asyncio.TaskGroup() as tasks:
        gateway = Gateway(worker.address, auto_ack=auto_ack)
        leader = Leader(worker.address)
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=worker.epoch)
        bench = Bench(worker, gateway, leader, tasks)
        try:
            yield bench
        finally:
            await bench.gateway.detach()
            await bench.leader.close()


class Pair:
    """A prefill and a decode worker with one gateway and one leader on each."""

    def __init__(self, prefill: Worker, decode: Worker, gateways: list[Gateway], leaders: list[Leader]) -> None:
        self.prefill, self.decode = prefill, decode
        self.prefill_gateway, self.decode_gateway = gateways
        self.prefill_leader, self.decode_leader = leaders

    async def submit(self, prompt: list[int], **fields) -> Attempt:
        """Submit both halves, decode first."""
        attempt = fields.pop("attempt", None) or new_attempt()
        to_prefill, to_decode = pair_submits(self.prefill, self.decode, prompt, attempt, **fields)
        await self.decode_leader.send(submit=to_decode)
        await self.prefill_leader.send(submit=to_prefill)
        return attempt


@asynccontextmanager
async def timed_pair(latency: LatencyModel = FAST, **options) -> AsyncIterator[Pair]:
    async with (
        running_worker(Role.PREFILL, latency, **options) as prefill,
        running_worker(Role.DECODE, latency, **options) as decode,
        asyncio.TaskGroup() as tasks,
    ):
        workers = (prefill, decode)
        gateways = [Gateway(w.address) for w in workers]
        leaders = [Leader(w.address) for w in workers]
        for worker, gateway, leader in zip(workers, gateways, leaders, strict=True):
            await leader.open(tasks)
            await gateway.attach(tasks, epoch=worker.epoch)
        try:
            yield Pair(prefill, decode, gateways, leaders)
        finally:
            for peer in gateways:
                await peer.detach()
            for leader in leaders:
                await leader.close()
