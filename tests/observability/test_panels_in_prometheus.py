"""Every panel's query, in a real Prometheus that scrapes a real stack under load."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from observability.dashboards.build import BOARDS
from tests.e2e.stream_load import all_streams
from tests.e2e.test_scaled_fleet import scaled
from tests.observability.prometheus import Prometheus, running_prometheus
from tests.processes import Stack, until

RARE = {
    # Empty on a healthy stack: these count faults, moves of workers or refusals that this load does not make.
    "Missed requests by phase blamed",
    "Refusals by reason",
    "Flips by reason",
    "Prompt tokens computed again and saved",
    "Retries by cause",
    "Attainment with refusals as misses",  # needs both kinds of counters
}
SCALED = {"Workers asked for", "Starts and stops by reason", "Cold start by part, p50"}
"""Panels of pools whose workers come and go by demand."""
JOBS = {"gateway": "pdgate-gateway", "scheduler": "pdgate-scheduler", "billing": "pdgate-billing"}


@pytest.fixture
async def scraped(
    stack_folder: Path, redis_url, database_url, catalog_file, models_dir
) -> AsyncIterator[tuple[Stack, Prometheus]]:
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    for role in ("prefill", "decode"):
        for number in range(2):
            stack.add_worker(f"{role}-{number}", role=role, environ={"WORKER_STEP_MS": "5", "WORKER_TRANSFER_MS": "2"})
    stack.start()
    targets: dict[str, list[str]] = {}
    for name, port in stack.metrics_ports.items():
        targets.setdefault(JOBS.get(name, "pdgate-worker"), []).append(f"127.0.0.1:{port}")
    try:
        await stack.ready()
        with running_prometheus(stack_folder / "prometheus", targets) as prometheus:
            yield stack, prometheus
    finally:
        stack.stop()


def panel_queries() -> set[tuple[str, str, str]]:
    """Return board, panel and query of every panel, for all models and pools."""
    return {
        (board.uid, panel.title, query.expr.replace('$model|"', '.*"').replace("$model", ".*").replace("$pool", ".*"))
        for board in BOARDS
        for _, panels in board.rows
        for panel in panels
        for query in panel.queries
    }


async def load(stack: Stack, *, streams: int) -> None:
    """Ask until cancelled: a rate needs samples that grow from one scrape to the next."""
    body = {"model": "tiny", "stream": True, "max_tokens": 40}
    headers = {"authorization": f"Bearer {stack.api_key}"}

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
            for turn in count():
                words = f"client {number} says {turn} " * 20
                asked = {**body, "messages": [{"role": "user", "content": words}]}
                async with http.stream("POST", "/v1/chat/completions", json=asked, headers=headers) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_bytes():
                        pass

    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(client(number))


@pytest.mark.e2e
async def test_every_panel_shows_something_and_no_alert_fires(scraped: tuple[Stack, Prometheus]) -> None:
    stack, prometheus = scraped
    queries = {query for query in panel_queries() if query[1] not in SCALED}

    def empty() -> set[tuple[str, str, str]]:
        return {query for query in queries if not prometheus.query(query[2])}

    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(load(stack, streams=8))
        try:
            await until(lambda: all(title in RARE for _, title, _ in empty()), 90, every_s=1)
        except TimeoutError:
            pytest.fail("\n".join(map(str, sorted(query for query in empty() if query[1] not in RARE))))
        finally:
            asking.cancel()
    nan = {query for query in queries if any(series["value"][1] == "NaN" for series in prometheus.query(query[2]))}
    assert nan == set()
    attainment = prometheus.query("min(pdgate_request_slo_met_ratio)")
    assert float(attainment[0]["value"][1]) == 1.0
    assert {name for name, state in prometheus.alerts().items() if state == "firing"} == set()
    assert not prometheus.query("pdgate_telemetry_faults_total > 0")


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_panels_of_workers_by_demand_show_a_pool_that_comes_from_nothing(
    stack_folder: Path, redis_url, database_url, catalog_file, models_dir, tmp_path
) -> None:
    queries = {query for query in panel_queries() if query[1] in SCALED}
    assert {title for _, title, _ in queries} == SCALED
    async with scaled(stack_folder, redis_url, database_url, catalog_file, models_dir, tmp_path) as pool:
        scheduler = f"127.0.0.1:{pool.stack.metrics_ports['scheduler']}"
        with running_prometheus(stack_folder / "prometheus", {"pdgate-scheduler": [scheduler]}) as prometheus:
            # A counter that begins at one has no rate: the scheduler is seen before anything starts.
            await until(lambda: prometheus.query("up == 1"), 30)
            assert {finish for _, finish in await all_streams(pool.stack, streams=1)} == {"length"}
            shown: dict[str, list] = {}

            def all_shown() -> bool:
                shown.update({title: prometheus.query(query) for _, title, query in queries})
                return all(shown[title] for title in SCALED)

            await until(all_shown, 90, every_s=1)
            asked = {one["metric"]["role"]: float(one["value"][1]) for one in shown["Workers asked for"]}
            assert asked["unified"] == 2  # the floor of this pool
