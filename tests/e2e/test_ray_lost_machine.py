"""A Ray cluster loses a machine under streams: workers run again on another one of the zone, and no request is lost."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from contracts import keys
from contracts.lifecycle import Role
from contracts.resp import redis_client
from scheduler.fleet.launch import Launch
from scheduler.fleet.protocol import InstanceState, WorkerSpec
from tests.processes import PEER_TOKEN, REPOSITORY, Stack, until
from tests.scheduler_fleet.ray_cluster import RayMachines, agent_of, process_of, ray_machines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STREAMS, TOKENS = 24, 120
GROUP = (Role.PREFILL, Role.DECODE)


@pytest.fixture(scope="module")
def machines():
    with ray_machines({"a-1": "a", "b-1": "b"}, cpus=2) as machines:
        yield machines


def timed_workers(stack: Stack) -> Launch:
    return Launch(
        argv=(sys.executable, "-m", "workers"),
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "WORKER_ENGINE": "timed",
            "WORKER_LISTEN": "{host}:0",
            "WORKER_BOOTSTRAP_HOST": "{host}",
            "WORKER_REDIS_URL": stack.redis_url,
            "WORKER_CATALOG": str(stack.catalog_file),
            "WORKER_MODEL_PATH": str(stack.models_dir / "tiny"),
            "WORKER_JOURNAL_DIR": str(stack.folder / "journal-{worker_id}"),
            "WORKER_PEER_TOKEN": PEER_TOKEN,
            "WORKER_STEP_MS": "50",
        },
        max_workers=4,
        zones=("a", "b"),
        resources={"CPU": 1},
    )


@pytest.fixture
async def stack(
    stack_folder: Path, redis_url: str, database_url: str, catalog_file: Path, models_dir: Path
) -> AsyncIterator[Stack]:
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler(cpu_profile=True)
    stack.add_billing()
    stack.start()
    yield stack
    stack.stop()


async def streamed(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> tuple[str, str]:
    """Return text and finish reason of one answer, or what went wrong; releases `begun` with the first text."""
    text, finish = "", ""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"story {number}"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return text, f"error: {chunk['error']}"
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    if not text:
                        begun.release()
                    text += piece
                finish = choice["finish_reason"] or finish
    return text, finish


async def all_streams(stack: Stack, lose: RayMachines | None = None) -> list[tuple[str, str]]:
    begun = asyncio.Semaphore(0)
    headers = {"authorization": f"Bearer {stack.api_key}"}
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=120) as client,
        asyncio.TaskGroup() as tasks,
    ):
        running = [tasks.create_task(streamed(client, number, begun)) for number in range(STREAMS)]
        if lose is not None:
            for _ in range(STREAMS):
                await begun.acquire()
            lose.lose("b-1")
    return [one.result() for one in running]


async def test_a_machine_that_is_lost_costs_no_request(machines: RayMachines, stack: Stack, tmp_path: Path):
    async with agent_of(machines, {"tiny": timed_workers(stack)}, tmp_path / "agent") as fleet:
        for zone in ("a", "b"):
            for role in GROUP:
                await fleet.start(WorkerSpec(worker_id=f"{role}-{zone}", pool="tiny", role=role, zone=zone))

        redis = redis_client(stack.redis_url)

        async def registered(number: int) -> bool:
            alive = [await redis.exists(keys.worker_lease("tiny", f"{r}-{z}")) for z in ("a", "b") for r in GROUP]
            return sum(alive) == number

        await until(lambda: registered(4), 120)
        await stack.ready()
        for zone in ("a", "b"):  # a pair never parts over two zones
            assert {machines.name_of(process_of(f"{role}-{zone}")) for role in GROUP} == {f"{zone}-1"}
        expected = await all_streams(stack)
        assert {finish for _, finish in expected} == {"length"}

        machines.add("b-2", zone="b", cpus=2)
        lost = {f"{role}-b": process_of(f"{role}-b").pid for role in GROUP}
        assert await all_streams(stack, lose=machines) == expected

        async def again() -> bool:
            found = {one.spec.worker_id: one for one in await fleet.list("tiny")}
            states = [found[worker_id] for worker_id in lost]
            return all(one.state is InstanceState.RUNNING and one.restarts == 1 for one in states)

        await until(again, 90)
        await until(lambda: registered(4), 60)
        for worker_id, pid in lost.items():
            process = process_of(worker_id)
            assert process.pid != pid
            assert machines.name_of(process) == "b-2"
        assert await all_streams(stack) == expected  # with all four again
        for one in await fleet.list("tiny"):
            await fleet.stop(one.spec.worker_id, grace_s=5)

        async def empty() -> bool:
            return not await fleet.list("tiny")

        await until(empty, 60)
        assert "worker_stops" in await fleet.logs("decode-b", max_bytes=100_000)
        assert await registered(0)
        await redis.aclose()
