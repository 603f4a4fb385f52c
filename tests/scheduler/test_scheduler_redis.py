"""A Redis that goes away while the scheduler leads."""

import asyncio
import tempfile
from pathlib import Path

from rig import SLOW_DECODE, eventually, running_rig, state_of
from rig_gateway import POOL

from contracts import keys
from contracts.lifecycle import FinishReason, RequestState, Role
from contracts.resp import redis_client
from pdgate.services import start_valkey


async def test_calls_of_the_client_can_be_cancelled(redis_url: str):
    """With a socket timeout redis-py loses about one cancellation in three on Python 3.11."""
    client = redis_client(redis_url)
    for number in range(200):
        task = asyncio.get_running_loop().create_task(_ping_for_ever(client))
        await asyncio.sleep(number % 7 / 5000)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
    await client.aclose()


async def _ping_for_ever(client) -> None:
    while True:
        await client.ping()


async def test_running_requests_survive_a_restart_of_redis():
    with tempfile.TemporaryDirectory(prefix="pdgate-test-") as name:
        folder = Path(name)
        service = start_valkey(folder)
        try:
            async with running_rig(service.url) as rig:
                await rig.worker(Role.PREFILL)
                decode = await rig.worker(Role.DECODE, SLOW_DECODE)
                gateway = await rig.gateway()
                pool = await rig.leading(rig.scheduler())
                epoch = pool.lease.epoch
                request = await gateway.submit(max_tokens=60)
                await eventually(lambda: request.tokens)
                gateway.pause_lease()
                gateway._own[1].cancel()  # its reading of notices would fail
                for worker in rig.workers:
                    worker.tasks[1].cancel()
                service.stop()
                await eventually(lambda: pool.term is None)
                assert decode.running == 1
                service = start_valkey(folder)
                for worker in rig.workers:
                    rig.beat(worker)
                await eventually(lambda: pool.term is not None and pool.lease.epoch == epoch + 1)
                await eventually(lambda: request.reason() is FinishReason.LENGTH)
                await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)
                assert [a.rid for a in decode.submitted] == [request.rid]
        finally:
            service.stop()


async def test_an_entry_that_a_broken_read_took_is_read_again(redis_url: str):
    async with running_rig(redis_url) as rig:
        await rig.pair()
        gateway = await rig.gateway()
        pool = await rig.leading(rig.scheduler("s-reads"))
        await eventually(lambda: gateway)
        (reader,) = [c["id"] for c in await rig.redis.client_list() if c["cmd"] == "xreadgroup"]
        await rig.redis.client_kill_filter(_id=reader)
        request = await gateway.submit()
        # What the cut read would have done on the server, its answer lost with the connection.
        taken = await rig.redis.xreadgroup(keys.CONSUMER_GROUP_SCHEDULER, "s-reads", {keys.inbox(POOL): ">"})
        assert taken
        await eventually(lambda: request.reason() is FinishReason.LENGTH)
        assert pool.term is not None
