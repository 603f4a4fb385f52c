"""The gateway's link to a worker that has another life: a frozen process keeps nobody from the living one."""

import asyncio
from contextlib import asynccontextmanager

from contracts.lifecycle import Role
from contracts.v1 import worker_pb2 as pb
from contracts.wire import WorkerRef
from gateway.attach import WorkerLink
from gateway.table import LiveTable
from tests.workers.peers import running_worker


@asynccontextmanager
async def frozen_process():
    """A port where connections are accepted and nothing is ever answered."""
    connected = asyncio.Event()

    async def accept(reader, writer):
        connected.set()
        await reader.read(-1)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", connected
    finally:
        server.close()


async def attached(link: WorkerLink) -> None:
    async with asyncio.timeout(10):  # the keepalive that would end the frozen connection takes 15 s
        while not link.attached:  # noqa: ASYNC110 - the link tells nobody
            await asyncio.sleep(0.005)


async def test_a_frozen_old_process_does_not_keep_the_link_from_the_new_one():
    async with frozen_process() as (address, connected), running_worker(Role.UNIFIED) as worker:
        link = WorkerLink(
            WorkerRef(worker_id="w", epoch=worker.epoch - 1, address=address), gateway_id="gw", table=LiveTable()
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(link.run())
            await connected.wait()
            assert not link.attached
            link.seen(WorkerRef(worker_id="w", epoch=worker.epoch, address=worker.address))
            await attached(link)
            link.seen(WorkerRef(worker_id="w", epoch=worker.epoch - 1, address=address))  # an old lease
            assert link.address == worker.address
            running.cancel()


async def test_batches_of_an_earlier_life_are_dropped():
    link = WorkerLink(WorkerRef(worker_id="w", epoch=5, address="127.0.0.1:1"), gateway_id="gw", table=LiveTable())
    assert link._is_next(pb.StepBatch(seq=1, worker_epoch=5))
    assert not link._is_next(pb.StepBatch(seq=2, worker_epoch=4))
    assert link._is_next(pb.StepBatch(seq=2, worker_epoch=5))
    assert link._is_next(pb.StepBatch(seq=1, worker_epoch=6))
    assert not link._is_next(pb.StepBatch(seq=3, worker_epoch=5))
