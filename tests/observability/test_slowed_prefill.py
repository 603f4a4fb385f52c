"""The operator's story without Grafana: a slowed prefill worker, the alert, the blame, the flip, the recovery.

Prometheus is real and has our rules; all its windows are a fifteenth of what they are in production, so that an hour
passes in four minutes. The workers are timed: the one that prefills at first takes four times as long as the others.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.chromium import add_operator, browsing, keep, page_of, sign_in
from tests.observability.prometheus import Prometheus, running_prometheus
from tests.processes import REPOSITORY, Stack, until

FASTER = 15
RATE_RPS = 8.0
SLOW_MS, USUAL_MS = 480, 120
"""Of one prompt. The slow worker computes 2 prompts/s, a usual one 8: one usual worker beside it is enough."""
JOBS = {"gateway": "pdgate-gateway", "scheduler": "pdgate-scheduler", "billing": "pdgate-billing"}
EMAIL = "operator@example.org"
PAGES = {"story-fleet": "/portal/fleet?span=15m", "story-targets": "/portal/fleet/targets?range=1h"}
CATALOG_TARGETS = ("ttft_ms = 2000", "ttft_ms = 1500")


@pytest.fixture
async def slowed(
    stack_folder: Path, redis_url, database_url, catalog_file, models_dir
) -> AsyncIterator[tuple[Stack, Prometheus]]:
    catalog = stack_folder / "models.toml"
    catalog.write_text(catalog_file.read_text().replace(*CATALOG_TARGETS))
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog,
        models_dir=models_dir,
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler(environ={"SCHEDULER_DECISION_LOG": str(stack_folder / "decisions")})
    stack.add_billing()
    stack.add_worker("slow", role="prefill", environ={"WORKER_PREFILL_MS": str(SLOW_MS), "WORKER_STEP_MS": "10"})
    for number in range(4):
        usual = {"WORKER_PREFILL_MS": str(USUAL_MS), "WORKER_STEP_MS": "10"}
        stack.add_worker(f"decode-{number}", role="decode", environ=usual)
    stack.start()
    targets: dict[str, list[str]] = {}
    for name, port in stack.metrics_ports.items():
        targets.setdefault(JOBS.get(name, "pdgate-worker"), []).append(f"127.0.0.1:{port}")
    try:
        await stack.ready()
        with running_prometheus(stack_folder / "prometheus", targets, faster=FASTER) as prometheus:
            yield stack, prometheus
    finally:
        stack.stop()


@asynccontextmanager
async def load(stack: Stack) -> AsyncIterator[None]:
    """Run `pdgate bench` at a steady rate while the block runs, as the README's operations section says."""
    command = [
        sys.executable, "-m", "pdgate.cli", "bench", "--url", f"{stack.url}/v1", "--key", stack.api_key,
        "--model", "tiny", "--rate", str(RATE_RPS), "--arrivals", "constant", "--duration", "900",
        "--prompt-tokens", "24", "--output-tokens", "20", "--timeout", "120", "--out", str(stack.folder / "bench.json"),
    ]  # fmt: skip
    with (stack.folder / "bench.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=log, stderr=log
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def take_pictures(stack: Stack, folder: Path) -> None:
    """Write what the portal's operator pages show of this run; for docs/runbook.md, by `make screenshots`."""
    from playwright.async_api import async_playwright

    await add_operator(stack, EMAIL)
    async with async_playwright() as playwright, browsing(playwright) as browser:
        page = await page_of(browser, stack.url)
        await sign_in(page, EMAIL)
        for name, path in PAGES.items():
            await page.goto(path)
            await page.locator("figure.chart canvas").first.wait_for()
            shot = await page.screenshot(full_page=True)
            await asyncio.to_thread(keep, shot, folder / f"{name}-light.png")


def pool_now(stack: Stack) -> dict:
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "REDIS_URL": stack.redis_url,
        "PDGATE_CATALOG": str(stack.catalog_file),
    }  # fmt: skip
    command = [sys.executable, "-m", "pdgate.cli", "top", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_an_operator_sees_the_alert_the_blame_the_flip_and_the_recovery(slowed: tuple[Stack, Prometheus]) -> None:
    stack, prometheus = slowed

    async def ask(expression: str) -> list[dict]:
        return await asyncio.to_thread(prometheus.query, expression)

    async def fires() -> bool:
        return (await asyncio.to_thread(prometheus.alerts)).get("PdgateSloBurnFast") == "firing"

    async def flipped() -> bool:
        return bool(await ask('pdgate_flips_total{direction="decode_to_prefill",result="done"} > 0'))

    async def recovered() -> bool:
        seen = await ask("pdgate_request_slo_met_ratio")
        return bool(seen) and float(seen[0]["value"][1]) > 0.95 and not await fires()

    async with load(stack):
        await until(fires, 120, every_s=0.5)
        blamed = await ask("topk(1, sum by (phase_blamed) (pdgate_request_slo_total{met='false'}))")
        assert blamed[0]["metric"]["phase_blamed"] in ("prefill_queue", "prefill_compute")
        await until(flipped, 120, every_s=0.5)
        (flip, *_) = await ask('pdgate_flips_total{direction="decode_to_prefill",result="done"}')
        assert flip["metric"]["reason"] == "gain"
        await until(recovered, 180, every_s=1)
        shown = await asyncio.to_thread(pool_now, stack)
        if folder := os.environ.get("PDGATE_SCREENSHOTS"):
            await take_pictures(stack, Path(folder))
    assert shown["now"]["prefill"] >= 2
    assert max(shown["blamed"], key=shown["blamed"].get) in ("prefill_queue", "prefill_compute")
