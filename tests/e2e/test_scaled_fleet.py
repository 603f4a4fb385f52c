"""Workers by demand on real processes of one machine: a zone is lost, and all workers are replaced, under streams."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from contracts import keys
from contracts.resp import redis_client
from scheduler.fleet.agent import serve_fleet
from scheduler.fleet.launch import Launch
from scheduler.fleet.local import LocalFleet, SessionSpawner
from tests.e2e.stream_load import all_streams
from tests.e2e.test_ray_lost_machine import processes, timed_workers
from tests.observability.test_traces import CALLER, ask, attributes, collector
from tests.processes import Stack, until

__all__ = ["collector"]  # a fixture
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCALING = """
[models.tiny.scaling]
max_workers = 4
idle_s = 600
min_unified = 2
zones = ["a", "b"]
"""


class Zones(SessionSpawner):
    """Zones of this machine that can be lost: nothing starts there any more."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    async def spawn(self, name, argv, env, output):
        if env["WORKER_ZONE"] in self.lost:
            raise OSError(f"zone {env['WORKER_ZONE']} is away")
        return await super().spawn(name, argv, env, output)


class Scaled:
    """A stack, the fleet that its scheduler has, and how the fleet starts workers."""

    def __init__(self, stack: Stack, fleet: LocalFleet, zones: Zones, launches: dict[str, Launch]) -> None:
        self.stack, self.fleet, self.zones, self.launches = stack, fleet, zones, launches
        self.redis = redis_client(stack.redis_url)

    async def serving(self) -> set[str]:
        """Return the workers that run and have registered."""
        found = set()
        for one in await self.fleet.list("tiny"):
            worker_id = one.spec.worker_id
            if self.fleet.pid(worker_id) and await self.redis.exists(keys.worker_lease("tiny", worker_id)):
                found.add(worker_id)
        return found

    async def zones_of(self) -> list[str]:
        return sorted(one.zone for one in await self.fleet.list("tiny"))

    async def lose(self, zone: str) -> None:
        self.zones.lost.add(zone)
        for one in await self.fleet.list("tiny"):
            if one.zone == zone and (pid := self.fleet.pid(one.spec.worker_id)):
                os.killpg(pid, signal.SIGKILL)


@asynccontextmanager
async def scaled(
    folder, redis_url, database_url, catalog_file, models_dir, tmp_path, *, otlp_endpoint: str = ""
) -> AsyncIterator[Scaled]:
    """Run a stack over a fleet of two zones, with nobody in it."""
    catalog, socket = tmp_path / "models.toml", tmp_path / "fleet" / "socket"
    catalog.write_text(catalog_file.read_text() + SCALING)
    environ = {"SCHEDULER_FLEET": "local", "SCHEDULER_FLEET_ADDRESS": str(socket)}
    async with processes(
        folder, redis_url, database_url, catalog, models_dir, environ, otlp_endpoint=otlp_endpoint
    ) as stack:
        launch = timed_workers(stack)
        here = {name: value.replace("{host}", "127.0.0.1") for name, value in launch.env.items()}
        launches, zones = {"tiny": msgspec.structs.replace(launch, env=here)}, Zones()
        async with asyncio.TaskGroup() as tasks:
            fleet = LocalFleet(tasks, launches, logs=tmp_path / "logs", spawner=zones)
            async with serve_fleet(fleet, socket):
                one = Scaled(stack, fleet, zones, launches)
                await stack.ready()
                yield one
                await one.redis.aclose()
            await fleet.close(grace_s=2)


@pytest.fixture
async def pool(stack_folder, redis_url, database_url, catalog_file, models_dir, tmp_path) -> AsyncIterator[Scaled]:
    async with scaled(stack_folder, redis_url, database_url, catalog_file, models_dir, tmp_path) as one:
        assert [finish for _, finish in await all_streams(one.stack, streams=1)] == ["length"]  # from nothing

        async def two() -> bool:
            return len(await one.serving()) == 2

        await until(two, 60)
        yield one


async def test_a_zone_that_is_lost_costs_no_request_and_the_other_one_makes_up_for_it(pool: Scaled):
    expected = await all_streams(pool.stack)
    assert {finish for _, finish in expected} == {"length"}
    assert await pool.zones_of() == ["a", "b"]
    assert await all_streams(pool.stack, lambda: pool.lose("b")) == expected

    async def made_up() -> bool:
        return await pool.zones_of() == ["a", "a"] and len(await pool.serving()) == 2

    await until(made_up, 90)
    assert await all_streams(pool.stack) == expected


async def test_a_changed_launch_replaces_all_workers_under_streams_and_none_breaks_off(pool: Scaled):
    expected = await all_streams(pool.stack)

    async def change() -> None:
        launch: Launch = pool.launches["tiny"]
        pool.launches["tiny"] = msgspec.structs.replace(launch, env={**launch.env, "WORKER_STEP_MS": "40"})

    assert await all_streams(pool.stack, change) == expected

    async def replaced() -> bool:
        there = {one.spec.worker_id: one.outdated for one in await pool.fleet.list("tiny")}
        return len(there) == 2 and not any(there.values())

    for _ in range(20):  # streams go on while they are replaced
        assert await all_streams(pool.stack) == expected
        if await replaced():
            break
    await until(replaced, 30)


async def test_a_cold_start_is_in_the_metrics_and_in_the_trace_of_the_request_that_waited_for_it(
    stack_folder, redis_url, database_url, catalog_file, models_dir, tmp_path, collector
):
    kept, endpoint = collector
    parts = ("place", "load", "warm")
    async with scaled(
        stack_folder, redis_url, database_url, catalog_file, models_dir, tmp_path, otlp_endpoint=endpoint
    ) as one:
        answer = await ask(one.stack, {"traceparent": CALLER})
        assert answer.status_code == 200
        assert float(answer.headers["x-pdgate-cold-start"]) > 0
        wanted = {"gateway/chat tiny", "scheduler/schedule", *(f"scheduler/cold_start_{part}" for part in parts)}
        await until(lambda: wanted <= set(kept.of(CALLER.split("-")[1])), 60)
        spans = {name: span for name, (_, span) in kept.of(CALLER.split("-")[1]).items()}
        root, schedule = spans["gateway/chat tiny"], spans["scheduler/schedule"]
        starts = [spans[f"scheduler/cold_start_{part}"] for part in parts]
        assert {span.parent_span_id for span in starts} == {root.span_id}
        assert {attributes(span)["pdgate.worker"] for span in starts} == {"tiny-auto-unified-1"}
        for before, after in itertools.pairwise(starts):  # one after the other, without a gap
            assert before.end_time_unix_nano == after.start_time_unix_nano
        assert schedule.start_time_unix_nano < starts[0].end_time_unix_nano
        assert starts[-1].end_time_unix_nano // 1_000_000 <= schedule.end_time_unix_nano // 1_000_000
        async with httpx.AsyncClient() as client:
            port = one.stack.metrics_ports["scheduler"]
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        for part in parts:
            (line,) = [
                line
                for line in text.splitlines()
                if line.startswith("pdgate_cold_start_seconds_count") and f'phase="{part}"' in line
            ]
            assert float(line.split()[-1]) >= 1
