"""A model whose pool sleeps: who waits, who is sent away, and what either is told."""

import asyncio
import time

import pytest
from gateway_rig import HELLO, POOL, Rig, eventually

from contracts import keys
from contracts.scaling import ScaleNote, encode_note


async def says(rig: Rig, *, cold_s: float | None, mode: str = "auto", blocked: str = "") -> None:
    """Let the pool's leader say how its workers stand, and the gateway hear it."""
    note = ScaleNote(
        at_unix_ms=int(time.time() * 1000),
        mode=mode,
        prefill=0,
        decode=0,
        unified=0,
        why="asleep",
        cold_s=cold_s,
        blocked=blocked,
    )
    await rig.redis.set(keys.scaling(POOL), encode_note(note))
    await eventually(lambda: rig.gateway.fleet.pool(POOL).note == note)


@pytest.fixture
async def asleep(rig: Rig):
    """The gateway of a pool that has no worker and could have one in 20 s."""
    await rig.unregister(rig.prefill)
    await rig.unregister(rig.decode)
    await eventually(lambda: not rig.gateway.fleet.pool(POOL).workers)
    await says(rig, cold_s=20)
    yield rig
    await rig.redis.delete(keys.scaling(POOL))


async def test_the_first_request_is_queued_and_told_how_long_the_start_takes(asleep: Rig):
    ready = await asleep.client.get("/readyz")
    assert ready.status_code == 200  # who asks is served, if late
    request = asleep.client.build_request("POST", "/v1/chat/completions", json={**HELLO, "stream": True})
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(asleep.client.send(request, stream=True))
        submit = await asleep.scheduler.submit()
        await asleep.scheduler.placed(submit, decode=asleep.decode)
    answer = asked.result()
    assert answer.status_code == 200
    assert 1 <= float(answer.headers["x-pdgate-cold-start"]) <= 20
    await answer.aclose()


async def test_who_cannot_wait_leaves_nothing_behind(asleep: Rig):
    answer = await asleep.client.post("/v1/chat/completions", json=HELLO, headers={"x-pdgate-max-wait": "500ms"})
    assert answer.status_code == 503
    assert 1 <= int(answer.headers["retry-after"]) <= 20  # what is left of the start
    assert answer.json()["error"]["code"] == "no_capacity"
    assert await asleep.nothing_queued_or_reserved()


async def test_a_wait_that_is_no_time_is_400(rig: Rig):
    answer = await rig.client.post("/v1/chat/completions", json=HELLO, headers={"x-pdgate-max-wait": "soon"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-pdgate-max-wait"


async def test_a_pool_that_cannot_have_workers_refuses_and_says_why(asleep: Rig):
    await says(asleep, cold_s=33, blocked="no worker can be had: budget")
    answer = await asleep.client.post("/v1/chat/completions", json=HELLO)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "33"
    assert "budget" in answer.json()["error"]["message"]
    assert (await asleep.client.get("/readyz")).status_code == 503


async def test_in_shadow_nobody_wakes_a_pool(asleep: Rig):
    await says(asleep, cold_s=20, mode="shadow")
    assert (await asleep.client.post("/v1/chat/completions", json=HELLO)).status_code == 503
