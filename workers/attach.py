"""The Attach streams: one per gateway process, carrying its outbox down and acks and aborts up."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from contracts.v1 import worker_pb2 as pb
from contracts.wire import attempt_from_pb
from workers.assignments import Assignments
from workers.outbox import Outbox

log = structlog.get_logger()


class Attach:
    """All Attach streams of one worker."""

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments

    async def serve(self, commands: AsyncIterator[pb.AttachCommand], context: Any) -> None:
        """Serve one Attach call: Hello first, then batches down until either side ends it.

        A later call of the same gateway takes the outbox over and ends this one.
        """
        hello = await anext(aiter(commands), None)
        if hello is None or hello.WhichOneof("command") != "hello" or not hello.hello.gateway_id:
            log.warning("attach_without_hello")
            return
        outbox = self._assignments.outbox(hello.hello.gateway_id)
        own = hello.hello.worker_epoch == self._assignments.identity.epoch
        last_seq = hello.hello.last_seq if own else 0
        self._assignments.acknowledge(outbox, last_seq)
        reader = outbox.attach(last_seq)
        log.info("gateway_attached", gateway_id=outbox.gateway_id, last_seq=last_seq)
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(commands, outbox, reader))
                while (batch := await outbox.next_batch(reader)) is not None:
                    await context.write(batch)
                reading.cancel()
        finally:
            outbox.detach(reader)
            log.info("gateway_detached", gateway_id=outbox.gateway_id)

    async def _read(self, commands: AsyncIterator[pb.AttachCommand], outbox: Outbox, reader: int) -> None:
        try:
            async for command in commands:
                kind = command.WhichOneof("command")
                if kind == "ack":
                    self._assignments.acknowledge(outbox, command.ack.seq)
                elif kind == "abort":
                    abort = command.abort
                    attempt = attempt_from_pb(abort.id)
                    self._assignments.abort(attempt, all_samples=abort.all_samples, reason=abort.reason)
        finally:
            outbox.detach(reader)
