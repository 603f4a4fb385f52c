"""Endurance at 70 % of what the stack carries: `make soak`, `python -m benches.soak --minutes 120`.

First the capacity: the rate of calls is raised by half until answers take more than twice as long as unloaded, or any
is missing; the load is then 70 % of the most that were answered a second. With `--max-running` and `--step-ms` it is
the workers' places that are full then, as with accelerators, and not this machine: it may do other work beside.

While it runs, every few seconds resident memory and open files of each process, keys and memory of Valkey, and
connections and size of PostgreSQL are read. After a warm-up of a tenth of the time (a minute at least) each gets a line
fitted by least squares.

Flat is what grows over the whole rest by no more than its allowance: 5 % of its first value, or the floor written in
`FLOORS` where that is more. A slope that is within twice its own standard error of zero is flat too. Valkey keeps
settled requests for ten minutes and streams up to their bounds, and PostgreSQL keeps every row: so these are judged
(keys) or only printed (rows) once the run is longer than twice that time.

Every answer is compared with its expected text, as in `benches.chaos`. Written to benches/results/soak.json and
soak.svg.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import psutil
import uvloop

from benches.chaos.books import Books
from benches.chaos.callers import Callers, Prompts
from benches.chaos.plan import VALKEY
from benches.chaos.rounds import Rounds, rounds_of
from benches.chaos.site import PROCESSES, Site, end_cleanly, running
from pdgate.timeline import Curve, Panel, write_panels

RESULTS = Path(__file__).parent / "results" / "soak.json"
PLOT = RESULTS.with_suffix(".svg")
SHARE = 0.7
FIRST_RATE, STEP_S = 2.0, 8.0
ANSWERS_A_STEP = 8.0  # a step lasts at least this many answers: a queue that grows has to be felt
SAMPLE_S = 5.0
WRITTEN = 12  # one sample of so many is kept in the file and drawn
ALLOWANCE = 0.05
FLOORS = {"rss_mb": 8.0, "files": 8.0, "postgres_connections": 4.0}
"""What a series may grow whatever it began with: allocator arenas, connections of a pool that were not needed yet."""
LATER = ("valkey_keys", "valkey_mb")  # judged in long runs only
NEVER = ("postgres_mb",)
_SECONDS_KEPT = 600.0


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted line over the time after the warm-up."""

    series: str
    first: float
    last: float
    per_hour: float
    error_per_hour: float  # standard error of the slope
    grows: float  # over the whole time, by the line
    flat: bool


def fitted(series: str, points: Sequence[tuple[float, float]]) -> Slope:
    """Return the line through points of (seconds, value) and whether it is flat by the rule of this page."""
    mean_t, mean_v = fmean(t for t, _ in points), fmean(v for _, v in points)
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in points) / spread if spread else 0.0
    residuals = sum((v - mean_v - slope * (t - mean_t)) ** 2 for t, v in points)
    error = math.sqrt(residuals / max(1, len(points) - 2) / spread) if spread else 0.0
    first, last = points[0][1], points[-1][1]
    grows = slope * (points[-1][0] - points[0][0])
    kind = series.rpartition(" ")[2]
    allowed = max(ALLOWANCE * first, FLOORS.get(kind, 0.0))
    return Slope(
        series=series,
        first=round(first, 1),
        last=round(last, 1),
        per_hour=round(slope * 3600, 2),
        error_per_hour=round(error * 3600, 2),
        grows=round(grows, 2),
        flat=grows <= allowed or slope <= 2 * error,
    )


async def sample(site: Site, books: Books) -> dict[str, float]:
    """Return every series at this moment."""
    seen: dict[str, float] = {}
    for name in (*PROCESSES, VALKEY):
        process = psutil.Process(site.process(name).pid)
        with process.oneshot():
            seen[f"{name} rss_mb"] = process.memory_info().rss / 2**20
            seen[f"{name} files"] = process.num_fds()
    info = await site.redis.info("memory")
    seen["valkey_keys"] = await site.redis.dbsize()
    seen["valkey_mb"] = info["used_memory"] / 2**20
    database = await books.database()
    seen["postgres_connections"] = await database.fetchval("SELECT count(*) FROM pg_stat_activity")
    seen["postgres_mb"] = await database.fetchval("SELECT pg_database_size(current_database())") / 2**20
    return seen


async def carried(site: Site, prompts: Prompts) -> float:
    """Return the most calls a second that were answered at any rate, until answers take more than twice their time
    unloaded. Counted is the second half of each step, since what a queue takes in at first is not carried.
    """
    rate, best, unloaded_s, step_s = FIRST_RATE, 0.0, 0.0, STEP_S
    while True:
        callers = Callers(site.gateways, site.stack.api_key, prompts, rate=rate)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(callers.run())
            await asyncio.sleep(step_s)
            callers.stop()
            until_s = time.time()
        took_s = median(call.ended_s - call.began_s for call in callers.calls)
        unloaded_s = unloaded_s or took_s
        begun = len(callers.calls) / step_s  # by this client, which shares the machine
        ended = sum(until_s - step_s / 2 < call.ended_s <= until_s for call in callers.calls) / (step_s / 2)
        bad = sum(call.verdict != "done" for call in callers.calls)
        print(
            f"  {begun:.1f} calls/s begun, {ended:.1f} answered: half within {took_s:.2f} s, {bad} were not", flush=True
        )
        if bad:
            return best
        best = max(best, ended)
        if took_s > 2 * unloaded_s or begun < 0.8 * rate:
            return best
        step_s = max(STEP_S, ANSWERS_A_STEP * unloaded_s)
        rate *= 1.5


async def endure(site: Site, rounds: Rounds, prompts: Prompts, *, minutes: float, rate: float) -> dict[str, Any]:
    """Run the load for so long and return samples and verdicts."""
    callers = Callers(site.gateways, site.stack.api_key, prompts, rate=rate)
    samples: list[tuple[float, dict[str, float]]] = []
    counts: dict[str, int] = {}
    wrong = 0
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(callers.run())
        try:
            while (now_s := time.monotonic() - began_s) < minutes * 60:
                samples.append((now_s, await sample(site, rounds.books)))
                for call in callers.take_ended():
                    counts[call.verdict] = counts.get(call.verdict, 0) + 1
                    wrong += call.wrong
                    if call.verdict != "done":
                        print(f"  {call.rid} {call.verdict}: {call.error}", flush=True)
                if len(samples) % 12 == 0:
                    print(f"  {now_s / 60:4.1f} min: {counts}, {wrong} wrong", flush=True)
                await asyncio.sleep(SAMPLE_S)
        finally:
            callers.stop()
    for call in callers.take_ended():
        counts[call.verdict] = counts.get(call.verdict, 0) + 1
        wrong += call.wrong
    busy = await rounds.books.settled()
    warm_s = max(60.0, minutes * 6)
    kept = [(t, seen) for t, seen in samples if t >= warm_s] or samples
    slopes = [fitted(name, [(t, seen[name]) for t, seen in kept]) for name in kept[0][1]]
    is_long = kept[-1][0] - kept[0][0] > 2 * _SECONDS_KEPT
    judged = [s for s in slopes if s.series not in NEVER and (is_long or s.series not in LATER)]
    return {
        "minutes": minutes,
        "calls_per_s": round(rate, 1),
        "calls": counts,
        "wrong": wrong,
        "kept_at_the_end": busy,
        "starts_of_processes": site.starts,
        "warm_up_s": warm_s,
        "flat": all(s.flat for s in judged),
        "not_flat": [s.series for s in judged if not s.flat],
        "slopes": [msgspec.to_builtins(s) for s in slopes],
        "samples": [(round(t, 1), {k: round(v, 2) for k, v in seen.items()}) for t, seen in samples[::WRITTEN]],
    }


def plot(samples: Sequence[tuple[float, Mapping[str, float]]], file: Path) -> None:
    """Draw memory, files, keys and connections over time."""

    def panel(title: str, wanted: Sequence[str]) -> Panel:
        curves = [Curve(name=name.partition(" ")[0], values=[seen[name] for _, seen in samples]) for name in wanted]
        return Panel(title=title, top=1.1 * max(max(curve.values) for curve in curves), curves=curves)

    services, servers = ("gateway", "scheduler", "billing"), ("decode-0", "unified-0", VALKEY)
    write_panels(
        file,
        [t for t, _ in samples],
        [
            panel("resident memory, MB", [f"{name} rss_mb" for name in services]),
            panel("resident memory, MB", [f"{name} rss_mb" for name in servers]),
            panel("open files", [f"{name} files" for name in services]),
            panel("keys in Valkey", ["valkey_keys"]),
            panel("connections of PostgreSQL", ["postgres_connections"]),
        ],
    )


async def bench(minutes: float, folder: Path, workers: Mapping[str, str]) -> dict[str, Any]:
    """`workers`: environment of every worker, beside what faults need."""
    end_cleanly()
    async with running(folder, None, has_relays=False, workers=workers) as site, rounds_of(site, seed=0) as rounds:
        prompts = Prompts(folder / "models" / "tiny" / "tokenizer.json", seed=1)
        print("looking for what the stack carries")
        capacity = await carried(site, prompts)
        print(f"{capacity:g} calls/s; {SHARE:.0%} of it for {minutes:g} minutes", flush=True)
        return await endure(site, rounds, prompts, minutes=minutes, rate=SHARE * capacity)


def main() -> None:
    """Run and judge; exit 1 when anything is wrong or not flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--max-running", type=int, help="places of each worker (default: more than this machine fills)")
    parser.add_argument("--step-ms", type=float, help="a decode step (default 7)")
    asked = parser.parse_args()
    wanted = {"WORKER_MAX_RUNNING": asked.max_running, "WORKER_STEP_MS": asked.step_ms}
    workers = {name: str(value) for name, value in wanted.items() if value is not None}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    folder = Path(tempfile.mkdtemp(prefix="pdgate-soak-"))
    folder.chmod(0o755)
    try:
        result = uvloop.run(bench(asked.minutes, folder, workers))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result |= {
        "commit": commit.stdout.strip(),
        "command": f"python -m benches.soak {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{os.cpu_count()} cores, {platform.system()}, load average {os.getloadavg()[0]:.1f}",
    }
    print(f"{'series':<34} {'first':>9} {'last':>9} {'per hour':>10} {'± error':>9}  flat")
    for slope in result["slopes"]:
        print(
            f"{slope['series']:<34} {slope['first']:>9} {slope['last']:>9} {slope['per_hour']:>10}"
            f" {slope['error_per_hour']:>9}  {'yes' if slope['flat'] else 'no'}"
        )
    plot(result["samples"], PLOT)
    RESULTS.write_text(json.dumps(result, indent=None) + "\n")
    bad = result["wrong"] + sum(n for what, n in result["calls"].items() if what != "done") + len(result["not_flat"])
    raise SystemExit(f"not flat: {result['not_flat']}; calls: {result['calls']}, {result['wrong']} wrong" if bad else 0)


if __name__ == "__main__":
    main()
