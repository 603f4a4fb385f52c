"""Two models and a machine with room for one worker: the room goes to and fro, no more often than it may."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from scheduler.fleet.agent import serve_fleet
from scheduler.fleet.local import LocalFleet
from tests.conftest import CATALOG
from tests.e2e.test_ray_lost_machine import processes, timed_workers
from tests.processes import Stack, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RESIDENCE_S = 4.0
SCALING = f"""
[models.NAME.scaling]
max_workers = 1
idle_s = 600
residence_s = {RESIDENCE_S}
"""
MODELS = ("tiny", "other")


@pytest.fixture
async def stack(stack_folder, redis_url, database_url, models_dir, tmp_path: Path) -> AsyncIterator[Stack]:
    catalog, socket = tmp_path / "models.toml", tmp_path / "fleet" / "socket"
    entry = CATALOG[CATALOG.index("[models.tiny]") :].replace('aliases = ["tiny-alias"]\n', "")
    further = entry.replace("[models.tiny", "[models.other")
    catalog.write_text(CATALOG + further + "".join(SCALING.replace("NAME", name) for name in MODELS))
    environ = {"SCHEDULER_FLEET": "local", "SCHEDULER_FLEET_ADDRESS": str(socket)}
    async with processes(stack_folder, redis_url, database_url, catalog, models_dir, environ) as stack:
        launch = timed_workers(stack)
        here = {name: value.replace("{host}", "127.0.0.1") for name, value in launch.env.items()}
        here["WORKER_STEP_MS"] = "5"
        launch = msgspec.structs.replace(launch, env=here, zones=("",), max_workers=1)
        async with asyncio.TaskGroup() as tasks:
            fleet = LocalFleet(tasks, dict.fromkeys(MODELS, launch), logs=tmp_path / "logs", max_workers=1)
            async with serve_fleet(fleet, socket):
                await stack.ready()
                yield stack
            await fleet.close(grace_s=2)


async def answered(client: httpx.AsyncClient, model: str, deadline_s: float = 120.0) -> int:
    """Ask until there is an answer, as clients do that obey `retry-after`; return how often it was refused."""
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    began_s = time.monotonic()
    for refused in range(1000):
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            return refused
        assert answer.status_code == 503, answer.text
        assert float(answer.headers["retry-after"]) > 0
        assert time.monotonic() - began_s < deadline_s, answer.text
        await asyncio.sleep(1.0)
    raise AssertionError("never")


async def test_a_machine_goes_to_and_fro_between_two_models_and_is_not_loaded_over_and_over(stack: Stack):
    headers = {"authorization": f"Bearer {stack.api_key}"}
    began_s = time.monotonic()
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=90) as client:
        for turn in range(3):
            await answered(client, MODELS[turn % 2])
    took_s = time.monotonic() - began_s

    def pools_of(name: str) -> list[str]:
        events = [json.loads(line) for line in stack.log("scheduler").splitlines() if line.startswith("{")]
        return [event["pool"] for event in events if event["event"] == name]

    await until(lambda: len(pools_of("worker_booted")) >= 3, 30)
    assert pools_of("worker_booted") == ["tiny", "other", "tiny"]
    assert pools_of("worker_evicted") == ["tiny", "other"]
    assert len(pools_of("worker_booted")) <= took_s / RESIDENCE_S + 1
