"""The scheduler's end of one worker's Control stream, and how it is kept open.

1. Open the stream and send Hello with the epoch in force (0 = standby).
2. The first report is the Inventory: from here on the stream is up and commands may be sent.
3. Reports are handed to the owner one by one; commands that pile up during a write go out as one message.
4. On any end (reset, worker gone, `reopen`): the owner hears `stream_lost`, commands not yet written are
   dropped (the next Inventory shows what arrived), and the stream is opened again until `run` is cancelled.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc
import structlog

from contracts.credentials import NOBODY_ASKED, Credentials
from contracts.v1 import worker_pb2 as pb
from contracts.v1.worker_pb2_grpc import WorkerStub
from contracts.wire import VERSION

log = structlog.get_logger()

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_BATCH_COMMANDS = 128
_BATCH_PROMPT_BYTES = 1024 * 1024
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A worker that comes back is found at once; the pause between tries is ours.
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class StreamOwner(Protocol):
    """Who hears what a Control stream brings."""

    def inventory_received(self, inventory: pb.Inventory) -> None:
        """The stream is up."""

    def report_received(self, report: pb.ControlReport) -> None:
        """Any later report; `also` is unpacked already."""

    def stream_lost(self) -> None:
        """The stream ended; it is being opened again."""


_Call = grpc.aio.StreamStreamCall[pb.ControlCommand, pb.ControlReport]


@contextmanager
def _stream_may_end() -> Iterator[None]:
    """Let a stream's end pass, also one by our own `call.cancel()`; a cancelled task stays cancelled."""
    try:
        yield
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise


class ControlStream:
    """One worker's Control stream, opened again whenever it ends."""

    def __init__(
        self, address: str, scheduler_id: str, *, retry_s: float, credentials: Credentials = NOBODY_ASKED
    ) -> None:
        self._address = address
        self._scheduler_id = scheduler_id
        self._retry_s = retry_s
        self._credentials = credentials
        self._refused = False  # the worker did not take our token, and the log says so
        self._leader_epoch = 0
        self._up = False
        self._begun = False  # the current call has sent its Hello
        self._heard = False  # the current call has brought its Inventory
        self._outgoing: deque[pb.ControlCommand] = deque()
        self._wake = asyncio.Event()
        self._call: _Call | None = None

    def send(self, command: pb.ControlCommand) -> bool:
        """Queue a command; return False when the stream is not up, so nothing was sent."""
        if not self._up:
            return False
        self._outgoing.append(command)
        self._wake.set()
        return True

    def reopen(self, leader_epoch: int | None = None) -> None:
        """End the stream, if there is one, and open it again; with `leader_epoch` if given."""
        if leader_epoch is not None:
            self._leader_epoch = leader_epoch
        self._up = False
        # A call cancelled before it began never ends in grpc.aio. One that opens with an old epoch is
        # closed in `_session`.
        if self._call is not None and self._begun:
            self._call.cancel()

    async def run(self, owner: StreamOwner) -> None:
        """Keep the stream open until cancelled."""
        async with (
            self._credentials.channel(self._address, _CHANNEL_OPTIONS) as channel,
            asyncio.TaskGroup() as tasks,
        ):
            stub = WorkerStub(channel)  # type: ignore[no-untyped-call]
            tasks.create_task(self._keep_open(stub, owner))
            tasks.create_task(self._write())

    async def _keep_open(self, stub: WorkerStub, owner: StreamOwner) -> None:
        while True:
            epoch = self._leader_epoch
            self._heard = False
            call = self._call = stub.Control(metadata=self._credentials.metadata)
            try:
                with _stream_may_end():
                    await self._session(call, epoch, owner)
                await self._look_at_refusal(call)
            finally:
                self._up = self._begun = False
                self._outgoing.clear()
                call.cancel()
            owner.stream_lost()
            if not self._heard and epoch == self._leader_epoch:
                await asyncio.sleep(self._retry_s)

    async def _look_at_refusal(self, call: _Call) -> None:
        """Log once that the worker does not take our token, which looks like a dead worker otherwise."""
        if self._heard or not call.done():
            self._refused = False
        elif await call.code() is grpc.StatusCode.UNAUTHENTICATED and not self._refused:
            self._refused = True
            log.warning("worker_refuses_us", address=self._address, reason=await call.details())

    async def _session(self, call: _Call, leader_epoch: int, owner: StreamOwner) -> None:
        """Run one stream until the worker ends it."""
        hello = pb.Hello(scheduler_id=self._scheduler_id, leader_epoch=leader_epoch, v=VERSION)
        await call.write(pb.ControlCommand(hello=hello))
        self._begun = True
        first = await call.read()
        if not isinstance(first, pb.ControlReport) or first.WhichOneof("report") != "inventory":
            return
        self._up = leader_epoch == self._leader_epoch
        if not self._up:  # elected or deposed meanwhile: this Hello is out of date
            return
        self._heard = True
        owner.inventory_received(first.inventory)
        while True:
            report = await call.read()
            if not isinstance(report, pb.ControlReport):  # grpc.aio.EOF
                return
            owner.report_received(report)
            for also in report.also:
                owner.report_received(also)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing and self._call is not None:
                with _stream_may_end():
                    await self._call.write(self._next_message())

    def _next_message(self) -> pb.ControlCommand:
        """Take what is queued as one message, bounded so that long prompts do not delay an abort."""
        message = self._outgoing.popleft()
        size = len(message.submit.prompt)
        taken = 1
        while self._outgoing and taken < _BATCH_COMMANDS and size < _BATCH_PROMPT_BYTES:
            also = self._outgoing.popleft()
            size += len(also.submit.prompt)
            message.also.append(also)
            taken += 1
        return message
