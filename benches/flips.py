"""Role changes under load on timed workers: `python -m benches.flips`.

Three prefill and three decode workers serve requests all the time while one worker after the other changes its role and
a later one changes back. Nothing may be lost and every text must be right. Printed, and written to
`benches/results/flips.json`: drain time, the engine's own switch, and the control part, which is all the rest from the
command until the scheduler can place on the worker again. The real engine's figures, beside: `benches.flips_real`.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import msgspec

from contracts.lifecycle import Phase, Role
from contracts.perf import DecodeCost
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Refused, unpack_ids
from pdgate.services import start_valkey
from scheduler.pool import PoolScheduler
from tests.scheduler.rig import FAST, Rig, eventually, running_rig
from tests.scheduler.rig_gateway import GatewayRequest, RigGateway
from workers.engines.timed_text import expected_ids

RESULTS = Path(__file__).parent / "results" / "flips.json"
LATENCY = msgspec.structs.replace(FAST, decode=DecodeCost(fixed_ms=10.0))
ENGINE_SWITCH_MS = 10.0  # what the rig's engines take
IN_FLIGHT = 16
PROMPT_TOKENS = 600
MAX_TOKENS = 24


class Load:
    """Keeps `IN_FLIGHT` requests running until told to stop."""

    def __init__(self, gateway: RigGateway) -> None:
        self.requests: list[GatewayRequest] = []
        self.stopping = False
        self._gateway = gateway

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        while not self.stopping:
            request = await self._gateway.submit(PROMPT_TOKENS, max_tokens=MAX_TOKENS)
            self.requests.append(request)
            await eventually(lambda request=request: ended(request), "a request ends")
            await self._gateway.finish(request)

    def verdict(self) -> dict[str, int]:
        lost = sum(1 for r in self.requests if r.of(Refused) or not ended(r))
        wrong = sum(1 for r in self.requests if ended(r) and not r.of(Refused) and not right(r))
        return {"requests": len(self.requests), "lost": lost, "wrong": wrong}


def ended(request: GatewayRequest) -> bool:
    complete = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
    done = any(f.reason in complete for (_, _, phase), f in request.finished.items() if phase is not Phase.PREFILL)
    return done or bool(request.of(Refused))


def right(request: GatewayRequest) -> bool:
    attempt = max(attempt for attempt, _ in request.tokens)
    return request.tokens[attempt, 0] == expected_ids(unpack_ids(request.submit.prompt), MAX_TOKENS)


async def flips(rig: Rig, pool: PoolScheduler, gateway: RigGateway, number: int) -> list[dict[str, float]]:
    """Change roles `number` times, prefill to decode and back in turn."""
    rows = []
    for turn in range(number):
        source, target = (Role.PREFILL, Role.DECODE) if turn % 2 == 0 else (Role.DECODE, Role.PREFILL)
        donors = [w for w in rig.workers if w.server.condition.role is source]
        worker = donors[(turn // 2) % len(donors)]
        began_s = time.monotonic()
        result = await pool.actuator.flip(worker.worker_id, target, why="bench")
        assert result.ok, result.message
        gateway.attach(worker)
        await eventually(
            lambda worker=worker: (w := pool.registry.get(worker.worker_id, worker.registration.epoch)) and w.ready,
            "ready in its new role",
        )
        total_ms = (time.monotonic() - began_s) * 1000
        rows.append(
            {
                "total_ms": total_ms,
                "drain_ms": result.drain_ms,
                "switch_ms": result.switch_ms,
                "control_ms": total_ms - result.drain_ms - ENGINE_SWITCH_MS,
            }
        )
    return rows


def quantile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 1)


def write(**measured: object) -> None:
    """Write what was measured; other figures stay as they are written."""
    written = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**written, **measured}, indent=2) + "\n")


async def bench(number: int, folder: Path) -> dict[str, object]:
    valkey = start_valkey(folder)
    try:
        async with running_rig(valkey.url) as rig:
            for role in (Role.PREFILL, Role.DECODE) * 3:
                await rig.worker(role, LATENCY, probes=True)
            gateway = await rig.gateway()
            pool = await rig.leading(rig.scheduler())
            load = Load(gateway)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run())
                rows = await flips(rig, pool, gateway, number)
                load.stopping = True
            verdict = load.verdict()
    finally:
        valkey.stop()
    parts = ("drain_ms", "switch_ms", "control_ms", "total_ms")
    return {
        "flips": len(rows),
        **verdict,
        **{part: {"p50": quantile([r[part] for r in rows], 0.5), "p99": quantile([r[part] for r in rows], 0.99)}
           for part in parts},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=60)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(bench(parser.parse_args().flips, Path(folder)))
    write(**result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
