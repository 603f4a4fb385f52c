"""How long a pool has no leader when its leader is killed: `python -m benches.failover`.

Two scheduler processes serve the pool of a rig of timed workers under load. The one that leads gets SIGKILL, again and
again; each time another process is started as the next standby. Measured from the kill until the standby leads (it is
told apart by the lease key), and until a request that arrived after the kill has its first token. Printed, and written
to `benches/results/failover.json`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benches.flips import Load, quantile
from contracts import keys
from contracts.lifecycle import FinishReason, Role
from pdgate.services import start_valkey
from tests.scheduler.rig import SLOW_DECODE, Rig, RigWorker, eventually, running_rig
from tests.scheduler.rig_gateway import POOL, RigGateway

RESULTS = Path(__file__).parent / "results" / "failover.json"
CATALOG = """\
[models.tiny]
pool = "tiny"
tokenizer = "unused"
context_tokens = 4096

[models.tiny.price]
prefill_computed = "0.10"
prefill_cached = "0.02"
decode = "0.40"

[models.tiny.tiers.default]
ttft_ms = 4000
tpot_ms = 400
"""
_POLL_S = 0.002
_LEADER_AND_STANDBY = 2


class Standbys:
    """Scheduler processes of the pool: one leads, one stands by."""

    def __init__(self, redis_url: str, catalog: Path, log: Path) -> None:
        self._redis_url, self._catalog, self._log = redis_url, catalog, log
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._number = 0

    async def start(self) -> str:
        """Start another one and return its id."""
        self._number += 1
        name = f"scheduler-{self._number}"
        with self._log.open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "scheduler",
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "SCHEDULER_REDIS_URL": self._redis_url,
                    "SCHEDULER_CATALOG": str(self._catalog),
                    "SCHEDULER_ID": name,
                },
            )
        return name

    async def kill(self, name: str) -> None:
        """SIGKILL one."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def end(self) -> None:
        """Kill all that are left."""
        for name in list(self._processes):
            await self.kill(name)


async def leader(rig: Rig) -> str:
    """Return the leading scheduler's id; empty without one."""
    value = await rig.redis.get(keys.leader(POOL))
    return value.decode().rpartition(":")[0] if value else ""


async def led_by_another(rig: Rig, than: str) -> float:
    """Wait for another leader, and return when it was seen."""
    async with asyncio.timeout(30):
        while await leader(rig) in ("", than):  # noqa: ASYNC110 - a key in Redis has no event
            await asyncio.sleep(_POLL_S)
    return time.monotonic()


async def serves(gateway: RigGateway) -> None:
    """Wait until a request has been answered: the leader has its workers."""
    request = await gateway.submit(max_tokens=2)
    await eventually(lambda: request.reason() is FinishReason.LENGTH, "the leader serves")
    await gateway.finish(request)


async def kills(rig: Rig, gateway: RigGateway, standbys: Standbys, number: int) -> list[dict[str, float]]:
    """Kill the leader `number` times."""
    await standbys.start()
    await led_by_another(rig, "")
    rows = []
    for _ in range(number):
        await serves(gateway)
        await standbys.start()
        await eventually(
            lambda: all(num_streams(worker) == _LEADER_AND_STANDBY for worker in rig.workers), "both see all"
        )
        leading = await leader(rig)
        began_s = time.monotonic()
        await standbys.kill(leading)
        request = await gateway.submit(max_tokens=2)
        leads_s = await led_by_another(rig, leading)
        await eventually(lambda r=request: r.tokens, "the new leader serves")
        rows.append({"leads_ms": (leads_s - began_s) * 1000, "first_token_ms": (time.monotonic() - began_s) * 1000})
        await eventually(lambda r=request: r.reason() is FinishReason.LENGTH, "it ends")
        await gateway.finish(request)
    return rows


def num_streams(worker: RigWorker) -> int:
    """Return how many schedulers have said hello to a worker."""
    return sum(1 for stream in worker.server._control._streams if stream.epoch is not None)  # noqa: SLF001


async def bench(number: int, folder: Path) -> dict[str, object]:
    catalog = folder / "models.toml"
    catalog.write_text(CATALOG)
    valkey = start_valkey(folder)
    try:
        async with running_rig(valkey.url) as rig:
            standbys = Standbys(valkey.url, catalog, folder / "schedulers.log")
            try:
                for role in (Role.PREFILL, Role.DECODE) * 2:
                    await rig.worker(role, SLOW_DECODE, probes=True)
                gateway = await rig.gateway()
                load = Load(gateway)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(load.run())
                    rows = await kills(rig, gateway, standbys, number)
                    load.stopping = True
                verdict = load.verdict()
            finally:
                await standbys.end()
    finally:
        valkey.stop()
    return {
        "kills": len(rows),
        **{
            part: {
                "p50": quantile([row[part] for row in rows], 0.5),
                "p99": quantile([row[part] for row in rows], 0.99),
            }
            for part in ("leads_ms", "first_token_ms")
        },
        "load": verdict,
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(bench(args.kills, Path(folder)))
    args.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
