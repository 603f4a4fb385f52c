"""The Attach stream to one worker: tokens in, acknowledgements and aborts out.

1. Connect, say who we are and which batch was processed last; the worker replays what follows.
2. For each StepBatch: open slots, push chunks into them, finish them. Repeated sequence numbers are
   skipped, so nothing is written twice. What opens brings the notice of its placement along, so that a short
   answer does not wait for the one in Redis.
3. Acknowledge soon when a batch held an end (should this gateway die before it has settled, that makes it
   billable), otherwise every few batches, before the worker's ring is full.
4. A link that is doubted, because nothing comes from it, asks the worker's health service over the same connection.
   Any answer will do; without one the connection is given up. TCP alone notices a link that drops everything only
   when something is sent, and HTTP/2's own pings are answered by a process that is frozen.
5. When the stream breaks, connect again. Slots stay, since the worker's ring bridges the gap; they are
   lost when the worker says so, when it comes back with another epoch, or when the fleet gives it up.
"""

import asyncio
import math
from collections import deque
from typing import Any, Final

import grpc.aio
import msgspec
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.credentials import NOBODY_ASKED, Credentials
from contracts.identity import rid_from_bytes
from contracts.parsing import detail_from_pb
from contracts.v1 import worker_pb2 as pb
from contracts.v1 import worker_pb2_grpc
from contracts.wire import PHASE_FROM_PB, VERSION, Placed, WorkerRef, decode_notice
from gateway.generation import Generation
from gateway.outputs import Output
from gateway.slots import Slot
from gateway.table import LiveTable

log = structlog.get_logger()

ACK_EVERY: Final = 32
"""Batches between acknowledgements: 8,192 chunks of 256 streams, an eighth of the worker's ring."""

ACK_WITHIN_S: Final = 0.1
"""How long an end waits for its acknowledgement: a message costs each side about as much as 20 tokens.

Settlement, which comes first and takes a few ms, does not need it; a worker that changes its role waits for it."""

LINK_CHECK_S: Final = 1.0
"""How long a doubted worker may take to answer anything."""

_CONNECT_S: Final = 5.0
_RETRY_FIRST_S: Final = 0.02
_RETRY_LAST_S: Final = 0.5
_RETRY_REFUSED_S: Final = 5.0
_MAX_ABORTS: Final = 10_000
_NO_ANSWER: Final = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    # A link that is cut is found in two seconds while anything is sent, in seven otherwise.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class WorkerLink:
    """Our end of the Attach stream of one worker. `run` until cancelled."""

    def __init__(
        self,
        ref: WorkerRef,
        *,
        gateway_id: str,
        table: LiveTable,
        check_s: float = LINK_CHECK_S,
        credentials: Credentials = NOBODY_ASKED,
    ) -> None:
        self.worker_id = ref.worker_id
        self.address = ref.address
        self.attached = False
        self._now_s = asyncio.get_running_loop().time
        self._detached_s = self._heard_s = self._now_s()
        self._check_s = check_s
        self._doubted = asyncio.Event()
        self._unheard = False  # this connection was given up since nothing came back over it
        self._epoch = ref.epoch
        self._gateway_id = gateway_id
        self._table = table
        self._credentials = credentials
        self._refused = False  # the worker did not take our token
        self._slots: dict[int, Slot] = {}
        self._seq = 0
        self._acked = 0
        self._aborts: deque[pb.Abort] = deque(maxlen=_MAX_ABORTS)
        self._wake = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._connection: asyncio.Task[str] | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the worker's stream sent anything; infinite when there is no stream."""
        return self._now_s() - self._heard_s if self.attached else math.inf

    def abort(self, attempt: pb.AttemptId, reason: str) -> None:
        """Ask the worker to stop all samples of an attempt. Sent when the stream stands."""
        self._aborts.append(pb.Abort(id=attempt, all_samples=True, reason=reason))
        self._wake.set()

    def seen(self, ref: WorkerRef) -> None:
        """Take notice of the worker's registration: a later epoch has lost what the old one ran.

        An earlier one is that of a process which another has taken over from, a frozen one perhaps: its connection may
        stand for long and must not keep us from the living one.
        """
        if ref.epoch < self._epoch:
            return
        if ref.epoch > self._epoch or ref.address != self.address:
            self.address = ref.address
            if ref.epoch > self._epoch:
                self._begin_epoch(ref.epoch)
            if self._connection is not None:
                self._connection.cancel()

    @property
    def detached_for_s(self) -> float:
        """Seconds since the stream stood last; 0 while it stands."""
        return 0.0 if self.attached else self._now_s() - self._detached_s

    def doubt(self) -> None:
        """Check that the link still carries anything, if it is thought to stand."""
        self._doubted.set()

    def lose(self, cause: str) -> None:
        """Give up everything that runs on the worker."""
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.lost(cause)

    async def run(self) -> None:
        """Keep the stream up."""
        retry_s = _RETRY_FIRST_S
        while True:
            self._unheard = False
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._connection = tasks.create_task(self._connect())
                if self._unheard:
                    reason = f"no answer in {self._check_s:g} s"
                else:
                    reason = "another life" if self._connection.cancelled() else self._connection.result()
            except Exception:
                # A batch that we cannot digest is skipped by its number; its requests must not wait for the rest.
                log.exception("attach_failed", worker_id=self.worker_id)
                self.lose("gateway_fault")
                reason = "fault"
            if self.attached:
                log.info("worker_detached", worker_id=self.worker_id, reason=reason)
                self.attached = False
                self._detached_s = self._now_s() - (self._check_s if self._unheard else 0.0)
                retry_s = _RETRY_FIRST_S
            if self._refused:
                log.warning("worker_refuses_us", worker_id=self.worker_id, address=self.address, reason=reason)
                self._refused, retry_s = False, _RETRY_REFUSED_S
            await asyncio.sleep(retry_s)
            retry_s = min(_RETRY_LAST_S, retry_s * 2)

    async def _connect(self) -> str:
        async with self._credentials.channel(self.address, _OPTIONS) as channel:
            return await self._attach(channel)

    async def _attach(self, channel: grpc.aio.Channel) -> str:
        """Serve one connection and return why it ended."""
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        call: Any = stub.Attach(metadata=self._credentials.metadata)
        hello = pb.AttachHello(gateway_id=self._gateway_id, worker_epoch=self._epoch, last_seq=self._seq, v=VERSION)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await call.write(pb.AttachCommand(hello=hello))
                await call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            return self._reason(error)
        except TimeoutError:
            call.cancel()
            return "no connection in time"
        self._acked = self._seq
        self._heard_s = self._now_s()
        self.attached = True
        log.info("worker_attached", worker_id=self.worker_id, address=self.address, last_seq=self._seq)
        async with asyncio.TaskGroup() as tasks:
            beside = tasks.create_task(self._write(call)), tasks.create_task(self._check(channel))
            reason = await self._read(call)
            for task in beside:
                task.cancel()
        return reason

    async def _read(self, call: Any) -> str:
        read = call.read
        try:
            while (batch := await read()) is not grpc.aio.EOF:
                self._take(batch)
        except grpc.aio.AioRpcError as error:
            return self._reason(error)
        return "ended by the worker"

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._aborts:
                    await call.write(pb.AttachCommand(abort=self._aborts[0]))
                    self._aborts.popleft()
                if self._seq > self._acked:
                    self._acked = self._seq
                    await call.write(pb.AttachCommand(ack=pb.Ack(seq=self._acked)))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees why

    async def _check(self, channel: grpc.aio.Channel) -> None:
        """Whenever it is doubted, find out whether the connection is one; if not, end it."""
        health: Any = health_pb2_grpc.HealthStub(channel)
        connection = self._connection
        self._doubted.clear()
        while True:
            await self._doubted.wait()
            seq = self._seq
            try:
                await health.Check(
                    health_pb2.HealthCheckRequest(), timeout=self._check_s, metadata=self._credentials.metadata
                )
            except grpc.aio.AioRpcError as error:
                silent = error.code() in _NO_ANSWER and self._seq == seq
                if silent and connection is not None:
                    self._unheard = True
                    connection.cancel()
                    return
            self._doubted.clear()

    def _take(self, batch: pb.StepBatch) -> None:
        """Route one batch. The hot path: no awaiting, as little Python per token as possible."""
        self._heard_s = self._now_s()
        if not self._is_next(batch):
            return
        for opened in batch.opened:
            self._open(opened)
        find, touched = self._slots.get, []
        if batch.details:
            touched += self._take_details(batch)
        else:
            ids, at = batch.token_ids, 0
            for handle, text, num_tokens in zip(batch.handle, batch.text, batch.num_tokens, strict=True):
                end = at + 4 * num_tokens
                slot = find(handle)
                if slot is not None:
                    slot.push(text, num_tokens, ids[at:end])
                    touched.append(slot.output)
                at = end
        if batch.finished:
            touched += self._finish(batch)
            self._acknowledge_soon()
        elif self._seq - self._acked >= ACK_EVERY:
            self._wake.set()
        for output in touched:
            output.flush()

    def _take_details(self, batch: pb.StepBatch) -> list[Output]:
        """Push the chunks of a batch in which some are more than text, and return their outputs."""
        details = {detail.entry: detail_from_pb(detail) for detail in batch.details}
        touched: list[Output] = []
        ids, at = batch.token_ids, 0
        for entry, (handle, text, num_tokens) in enumerate(
            zip(batch.handle, batch.text, batch.num_tokens, strict=True)
        ):
            end = at + 4 * num_tokens
            slot = self._slots.get(handle)
            if slot is not None:
                slot.push(text, num_tokens, ids[at:end], details.get(entry))
                touched.append(slot.output)
            at = end
        return touched

    def _acknowledge_soon(self) -> None:
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_WITHIN_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_timer = None
        self._wake.set()

    def _finish(self, batch: pb.StepBatch) -> list[Output]:
        """End the requests whose end the batch holds, and return their outputs."""
        ended: list[Output] = []
        for finished in batch.finished:
            slot = self._slots.pop(finished.handle, None)
            if slot is not None:
                slot.finish(finished)
                ended.append(slot.output)
        return ended

    def _is_next(self, batch: pb.StepBatch) -> bool:
        """Check epoch, sequence number and the worker's own word on losses."""
        if batch.worker_epoch != self._epoch:
            if batch.worker_epoch < self._epoch:
                return False  # the last words of a life that is over
            self._begin_epoch(batch.worker_epoch)
        if batch.seq <= self._seq:
            return False
        self._seq = batch.seq
        if batch.lost:
            log.warning("tokens_lost", worker_id=self.worker_id, num_requests=len(self._slots))
            self.lose("ring_overflow")
        return True

    def _open(self, opened: pb.Opened) -> None:
        attempt, phase = opened.id, PHASE_FROM_PB[opened.phase]
        generation = self._table.find_bytes(attempt.rid)
        slot = None
        if generation is not None:
            if opened.placed:
                self._placed(generation, opened.placed)
            slot = generation.opened(attempt.attempt, attempt.sample, phase, self.worker_id)
        if slot is None:
            # Settled or replaced. A prefill ends by itself at once; what streams would go on for nobody.
            if opened.phase != pb.PHASE_PREFILL:
                log.info("unknown_attempt", worker_id=self.worker_id, rid=rid_from_bytes(attempt.rid))
                self.abort(attempt, "unknown_attempt")
            return
        self._slots[opened.handle] = slot

    def _placed(self, generation: Generation, raw: bytes) -> None:
        """Take the notice of a placement that came with the first tokens."""
        try:
            notice = decode_notice(raw)
        except msgspec.DecodeError as error:
            log.error("bad_notice", worker_id=self.worker_id, error=str(error))  # noqa: TRY400 - the entry's fault, not ours
            return
        if isinstance(notice, Placed) and notice.rid == generation.terms.rid:
            generation.notice_placed(notice)

    def _begin_epoch(self, epoch: int) -> None:
        if self._epoch:
            self.lose("worker_restarted")
        self._epoch = epoch
        self._seq = self._acked = 0

    def _reason(self, error: grpc.aio.AioRpcError) -> str:
        self._refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
        return error.details() or str(error.code())
