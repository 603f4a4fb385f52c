"""A worker that lives, and that one gateway cannot hear: a proxy between them swallows everything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from gateway_rig import HELLO, Rig, eventually

from contracts.lifecycle import FinishReason, Phase
from contracts.usage import Outcome
from contracts.wire import Continue

PATIENT_S = 60  # the gateway's patience for a first token: what a request must not wait for


class Swallower:
    """A TCP proxy that can stop to carry anything, in both directions, without closing."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task] = set()
        self.address = ""

    def swallow(self) -> None:
        self._open.clear()

    def carry(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Swallower"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        host, _, port = self._upstream.partition(":")
        there, back = await asyncio.open_connection(host, int(port))
        try:
            with suppress(OSError):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._carry(reader, back))
                    tasks.create_task(self._carry(there, writer))
        finally:
            writer.close()
            back.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if self._open.is_set():
                sink.write(data)
                await sink.drain()
        sink.close()


async def test_a_request_on_a_worker_that_the_gateway_cannot_hear_goes_elsewhere_and_the_next_one_is_not_sent_there(
    rig: Rig,
):
    other, behind = rig.prefill, rig.decode
    async with Swallower(behind.address).running() as proxy:
        behind.address = proxy.address
        behind.epoch += 1  # it has moved behind the proxy
        await rig.register(behind)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
            submit = await rig.scheduler.submit()
            assert submit.unreachable == ()
            proxy.swallow()
            await rig.scheduler.placed(submit, decode=behind)
            entry = await rig.scheduler.next(timeout_s=PATIENT_S / 2)
            assert isinstance(entry, Continue)
            assert (entry.lost_attempt, entry.delivered, entry.unreachable) == (1, (), ("decode-0",))
            await rig.scheduler.placed(submit, decode=other, attempt=2)
            again = await other.open(submit.rid, Phase.UNIFIED, attempt=2)
            await again.tokens("heard")
            await again.finish(FinishReason.STOP, prompt=8, completion=1)
        assert asked.result().json()["choices"][0]["message"]["content"] == "heard"
        event = await rig.usage(submit.rid)
        assert (event.outcome, event.attempts) == (Outcome.FINISHED, 2)

        await eventually(lambda: rig.gateway.fleet.unreachable("tiny"))
        assert (await refused(rig)).unreachable == ("decode-0",)
        proxy.carry()
        await eventually(lambda: rig.gateway.fleet.attached("decode-0"), timeout_s=30)
        await eventually(lambda: not rig.gateway.fleet.unreachable("tiny"))
        assert (await refused(rig)).unreachable == ()


async def refused(rig: Rig):
    """Return what the gateway submits of one more request."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "enough")
    return submit


async def test_a_worker_that_answers_the_question_is_left_alone_however_long_its_prefill_takes(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        generation = await eventually(lambda: rig.gateway.table.find(submit.rid))
        await eventually(lambda: generation.placed)
        asked_before = rig.decode.num_checks
        await eventually(lambda: rig.decode.num_checks >= asked_before + 3)
        assert not rig.decode.aborts
        assert len(rig.decode.hellos) == 1
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await handle.tokens("slow")
        await handle.finish(FinishReason.STOP, prompt=8, completion=1)
    assert asked.result().json()["choices"][0]["message"]["content"] == "slow"
