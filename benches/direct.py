"""A client that talks straight to a timed worker over Control and Attach: what pdgate is measured against."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeVar

import grpc.aio

from contracts.credentials import Credentials
from contracts.identity import new_rid
from contracts.v1 import worker_pb2 as pb
from contracts.v1.worker_pb2_grpc import WorkerStub
from contracts.wire import Attempt, Sampling, attempt_from_pb, attempt_to_pb, pack_ids, sampling_to_pb
from tests.processes import PEER_TOKEN

GATEWAY_ID = "bench-direct"

Message = TypeVar("Message")


@dataclass
class Direct:
    """What was seen of one engine request."""

    started: float
    done: asyncio.Event
    first: float = 0.0
    events: list[float] = field(default_factory=list)
    tokens: int = 0


class DirectClient:
    """One Control and one Attach stream to one unified worker."""

    def __init__(self, address: str, *, worker_epoch: int) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._epoch = worker_epoch
        self._commands: asyncio.Queue[pb.ControlCommand] = asyncio.Queue(maxsize=4096)
        self._acks: asyncio.Queue[pb.AttachCommand] = asyncio.Queue(maxsize=4096)
        self._running: dict[Attempt, Direct] = {}
        self._handles: dict[int, tuple[Attempt, Direct]] = {}

    async def run(self, ready: asyncio.Event) -> None:
        """Read both streams until cancelled."""
        stub = WorkerStub(self._channel)
        hello = pb.Hello(scheduler_id=GATEWAY_ID, leader_epoch=2**40, v=1)
        self._commands.put_nowait(pb.ControlCommand(hello=hello))
        self._acks.put_nowait(pb.AttachCommand(hello=pb.AttachHello(gateway_id=GATEWAY_ID, v=1)))
        shown = Credentials(token=PEER_TOKEN).metadata
        control = stub.Control(_drain(self._commands), metadata=shown)
        attach = stub.Attach(_drain(self._acks), metadata=shown)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._reports(control, ready))
                tasks.create_task(self._batches(attach))
        finally:
            control.cancel()
            attach.cancel()
            await self._channel.close()

    async def _reports(self, control: AsyncIterator[pb.ControlReport], ready: asyncio.Event) -> None:
        async for report in control:
            for one in (report, *report.also):
                if one.HasField("inventory"):
                    ready.set()
                if one.HasField("rejected"):
                    raise RuntimeError(f"worker refused: {one.rejected.code} {one.rejected.message}")

    async def _batches(self, attach: AsyncIterator[pb.StepBatch]) -> None:
        async for batch in attach:
            now = time.perf_counter()
            for opened in batch.opened:
                attempt = attempt_from_pb(opened.id)
                if attempt in self._running:
                    self._handles[opened.handle] = (attempt, self._running[attempt])
            for handle, count in zip(batch.handle, batch.num_tokens, strict=True):
                entry = self._handles.get(handle)
                if entry is None:
                    continue
                seen = entry[1]
                seen.first = seen.first or now
                seen.events.append(now)
                seen.tokens += count
            for finished in batch.finished:
                entry = self._handles.pop(finished.handle, None)
                if entry is not None:
                    del self._running[entry[0]]
                    entry[1].done.set()
            if batch.finished or batch.seq % 16 == 0:
                self._acks.put_nowait(pb.AttachCommand(ack=pb.Ack(seq=batch.seq)))

    async def one(self, prompt: list[int], max_tokens: int, deadline_s: float = 120) -> Direct:
        """Run one request to its end."""
        attempt = Attempt(new_rid(int(time.time() * 1000)), 1, 0)
        seen = self._running[attempt] = Direct(started=time.perf_counter(), done=asyncio.Event())
        submit = pb.Submit(
            id=attempt_to_pb(attempt),
            leader_epoch=2**40,
            worker_epoch=self._epoch,
            phase=pb.PHASE_UNIFIED,
            gateway_id=GATEWAY_ID,
            deadline_unix_ms=int((time.time() + deadline_s) * 1000),
            prompt=pack_ids(prompt),
            sampling=sampling_to_pb(Sampling(max_tokens=max_tokens, temperature=0.0)),
        )
        self._commands.put_nowait(pb.ControlCommand(submit=submit))
        async with asyncio.timeout(deadline_s):
            await seen.done.wait()
        return seen


async def _drain(queue: "asyncio.Queue[Message]") -> AsyncIterator[Message]:
    while True:
        yield await queue.get()
