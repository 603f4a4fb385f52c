"""Limits over three gateway processes: never exceeded by one request, and back whatever becomes of them."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from redis.asyncio import Redis

from contracts import keys
from gateway.limits import Limits
from tests.e2e.ledger_view import nothing_is_reserved
from tests.processes import Stack, free_port, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

RUNNING = 4
REQUESTS = 40
CLIENTS = 30
REPLICAS = ("gateway", "gateway-b", "gateway-c")
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}


class Watched:
    """The most requests that ever ran at once, as the leases say."""

    def __init__(self, stack: Stack, redis: Redis) -> None:
        self.most = 0
        self._key = keys.concurrency_leases(stack.org, "key", stack.key_id)
        self._redis = redis

    async def running(self) -> int:
        return int(await self._redis.zcard(self._key))

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, await self.running())
            await asyncio.sleep(0.002)


@pytest.fixture
async def replicas(
    stack_folder, redis_url: str, database_url: str, catalog_file, models_dir
) -> AsyncIterator[tuple[Stack, list[str]]]:
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed(limits=Limits(concurrent_requests=RUNNING, requests_per_minute=REQUESTS))
    ports = [stack.gateway_port, free_port(), free_port()]
    for name, port in zip(REPLICAS, ports, strict=True):
        stack.add_gateway(name, port=port)
    stack.add_scheduler(cpu_profile=True)
    stack.add_worker("prefill-0", role="prefill", environ={"WORKER_STEP_MS": "5"})
    stack.add_worker("decode-0", role="decode", environ={"WORKER_STEP_MS": "20"})
    stack.start()
    await stack.ready()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with httpx.AsyncClient(timeout=30) as http:
        for url in urls:
            await until(lambda url=url: _ready(http, url), 60)
    yield stack, urls
    stack.stop()


async def _ready(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def test_racing_clients_of_three_processes_get_what_the_limits_say_and_not_one_more(
    replicas: tuple[Stack, list[str]], redis: Redis
):
    stack, urls = replicas
    headers = {"authorization": f"Bearer {stack.api_key}"}
    codes: list[str] = []
    watched = Watched(stack, redis)
    started = asyncio.get_running_loop().time()

    async def client(http: httpx.AsyncClient, url: str) -> None:
        """Ask until the minute's requests are used up, whatever the concurrency says meanwhile."""
        while True:
            answer = await http.post(f"{url}/v1/chat/completions", json=ASKED)
            if answer.status_code == 200:
                codes.append("ok")
                continue
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            if answer.headers["x-ratelimit-remaining-requests"] == "0":
                codes.append("minute")
                return
            await asyncio.sleep(0.05)  # too many at once

    async with httpx.AsyncClient(headers=headers, timeout=60) as http, asyncio.TaskGroup() as tasks:
        await watched.running()
        watching = tasks.create_task(watched.watch())
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(client(http, urls[number % len(urls)]))
        watching.cancel()
    elapsed_s = asyncio.get_running_loop().time() - started
    served = codes.count("ok")
    assert codes.count("minute") == CLIENTS
    # The bucket was full and is refilled by 40 a minute while this runs.
    assert REQUESTS <= served <= REQUESTS + int(elapsed_s * REQUESTS / 60) + 1
    assert watched.most == RUNNING
    await until(lambda: nothing_is_reserved(redis), 20)
    assert await watched.running() == 0


async def test_what_a_killed_gateway_had_reserved_comes_back(replicas: tuple[Stack, list[str]], redis: Redis):
    stack, urls = replicas
    headers = {"authorization": f"Bearer {stack.api_key}"}
    watched = Watched(stack, redis)

    async def long_stream() -> None:
        body = {**ASKED, "max_tokens": 2000, "stream": True}
        async with httpx.AsyncClient(base_url=urls[1], headers=headers, timeout=60) as http:
            try:
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_bytes():
                        pass
            except httpx.TransportError:
                return  # killed

    async with asyncio.TaskGroup() as tasks:
        for _ in range(RUNNING):
            tasks.create_task(long_stream())

        async def all_run() -> bool:
            return await watched.running() == RUNNING

        await until(all_run)
        async with httpx.AsyncClient(base_url=urls[0], headers=headers, timeout=60) as http:
            assert (await http.post("/v1/chat/completions", json=ASKED)).status_code == 429
        stack.kill("gateway-b")
    await until(lambda: nothing_is_reserved(redis), 60)
    async with httpx.AsyncClient(base_url=urls[0], headers=headers, timeout=60) as http:
        assert (await http.post("/v1/chat/completions", json=ASKED)).status_code == 200
