"""`python -m benches.portal`: how long the server takes for each page of the portal, and what it weighs.

A gateway with a week of requests of one organisation (`--requests`), in this process; an operator asks for every page
of the menu. `ms` is from the request to the last byte over loopback, the page alone; `cpu` what this process (the
gateway, and the client that asks) spent on it; `sql` the statements of one; `kB` is all it loads, compressed.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from contracts.catalog import read_catalog
from gateway.portal.navigation import MENU
from gateway.portal.roles import Role
from migrations.upgrade import upgrade
from pdgate.services import start_postgres, start_valkey
from tests.conftest import CATALOG, CHATML, tiny_tokenizer
from tests.gateway.gateway_rig import running_rig
from tests.portal.portal_rig import Browser, PortalRig
from tests.portal_pages.past import play_week

_ASSET = re.compile(r'(?:src|href)="(/portal/static/[^"]+)"')


async def measure(folder: Path, database_url: str, redis_url: str, *, requests: int, repeats: int) -> dict[str, Any]:
    """Return ms (p50, p95) and kB by page."""
    (folder / "models.toml").write_text(CATALOG)
    tokenizer = folder / "models" / "tiny"
    tokenizer.mkdir(parents=True)
    tiny_tokenizer().save(str(tokenizer / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=folder / "models.toml",
        catalog=read_catalog(folder / "models.toml"),
        models_dir=folder / "models",
        journal_dir=folder / "journal",
    ) as rig:
        portal = PortalRig(rig)
        owners = [(rig.project.id, rig.key.id)]
        await play_week(rig.gateway.engine, rig.redis, org=rig.org.id, owners=owners, num_requests=requests)
        browser = await portal.signed_in(Role.OPERATOR)
        paths = [place.path for _, places in MENU for place in places]
        said: list[str] = []
        engine = rig.gateway.engine.sync_engine
        sa.event.listen(engine, "before_cursor_execute", lambda *call: said.append(call[2]))
        found = {path: await _page(browser, f"{path}?org={rig.org.id}", repeats, said) for path in paths}
        await portal.close()
    return found


async def _page(browser: Browser, path: str, repeats: int, said: list[str]) -> dict[str, float]:
    took_ms, cpu_ms, statements, page = [], [], [], await browser.get(path)
    for _ in range(repeats):
        said.clear()
        began, began_cpu = time.perf_counter(), time.process_time()
        page = await browser.get(path)
        took_ms.append((time.perf_counter() - began) * 1000)
        cpu_ms.append((time.process_time() - began_cpu) * 1000)
        statements.append(len(said))
        assert page.status_code == 200, path
    weight = len(page.content)
    for asset in set(_ASSET.findall(page.text)):
        answer = await browser.get(asset, headers={"accept-encoding": "gzip"})
        weight += answer.num_bytes_downloaded
    cuts = statistics.quantiles(took_ms, n=20)
    return {
        "ms_p50": round(cuts[9], 1),
        "ms_p95": round(cuts[18], 1),
        "cpu_ms": round(statistics.median(cpu_ms), 1),
        "sql": statistics.median_low(statements),
        "kb": round(weight / 1000, 1),
    }


def main() -> int:
    """Print a line per page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdgate-portal-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's own user must get in
        valkey, postgres = start_valkey(folder / "valkey"), start_postgres(folder / "pg")
        try:
            upgrade(postgres.url)
            work = measure(folder, postgres.url, valkey.url, requests=asked.requests, repeats=asked.repeats)
            found = asyncio.run(work)
        finally:
            postgres.stop()
            valkey.stop()
    for path, figures in found.items():
        took = f"p50 {figures['ms_p50']:7.1f} ms   p95 {figures['ms_p95']:7.1f} ms   cpu {figures['cpu_ms']:6.1f} ms"
        print(f"{path:28} {took}   sql {figures['sql']:2}   {figures['kb']:6.1f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
