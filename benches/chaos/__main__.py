"""Faults of every kind under load, checked byte by byte and cent by cent: `make chaos`, `python -m benches.chaos`.

Two gateways, two schedulers, two billings, five timed workers, Valkey and PostgreSQL as processes. Each round sends
calls at a steady rate, does one fault of the plan (`benches/chaos/plan.py`) in their midst, waits until all is ready
again and all calls have ended, and checks the answers, the charges and that everything was given back. Faults come in
random order, every one before any comes again.

Cutting links between our processes, filling disks and mounting need root and Linux; what this machine cannot do is
left out and named. The full run is written to benches/results/chaos.json and docs/chaos.md; one with `--only` is not.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop

from benches.chaos import report
from benches.chaos.actions import needs
from benches.chaos.books import memory_mb
from benches.chaos.plan import PLAN, POSTGRES, SHORT, Fault
from benches.chaos.rounds import Round, rounds_of
from benches.chaos.site import Site, end_cleanly, old_version, running
from billing.reconcile import reconcile_database

SLOW_S = 2.0


def chosen(asked: argparse.Namespace) -> Sequence[Fault]:
    """Return the faults that are asked for, in the plan's order."""
    if asked.short:
        return [next(fault for fault in PLAN if fault.name == name) for name in SHORT]
    return [fault for fault in PLAN if asked.only in fault.name]


def sequence(faults: Sequence[Fault], rounds: int, seed: int) -> Iterator[Fault]:
    """Yield so many faults: all of them in random order, again and again."""
    choose, left = random.Random(seed), rounds
    while left:
        for fault in choose.sample(faults, min(left, len(faults))):
            left -= 1
            yield fault


async def bench(asked: argparse.Namespace, folder: Path) -> tuple[list[Round], dict[str, str], dict[str, object]]:
    """Do the rounds; return them, what was left out and why, and what the books say at the end."""
    done: list[Round] = []
    began_s = time.monotonic()
    end_cleanly()
    old = old_version(asked.old, folder)
    async with running(folder, old) as site, rounds_of(site, seed=asked.seed) as rounds:
        faults = chosen(asked)
        skipped = {fault.name: why for fault in faults if (why := needs(fault, site))}
        for name, why in skipped.items():
            print(f"left out: {name}: {why}")
        possible = [fault for fault in faults if fault.name not in skipped]
        if not possible:
            raise SystemExit("no fault of the plan is possible here, or has such a name")
        plan = possible if asked.short else list(sequence(possible, asked.rounds or len(possible), asked.seed))
        first = await rounds.run(None)
        before = memory_mb(site)
        print(report.head())
        print(report.line(first), flush=True)
        if first.account.bad:
            raise SystemExit(f"the site is not well before any fault: {first.account.notes}")
        for number, fault in enumerate(plan, start=1):
            if asked.minutes and time.monotonic() - began_s > asked.minutes * 60:
                print(f"stopped after {asked.minutes:g} minutes: {number - 1} of {len(plan)} faults")
                break
            one = await rounds.run(fault)
            done.append(one)
            print(f"{number:>4} {report.line(one)}", flush=True)
            if one.recovered_s > SLOW_S:
                print(f"        slow: {one.slowest}", flush=True)
            for note in one.account.notes if one.account.bad else ():
                print(f"        {note}", flush=True)
        after = memory_mb(site)
        grown = {
            name: round(after[name][1] - mb, 1)
            for name, (pid, mb) in before.items()
            if name in after and after[name][0] == pid
        }
        books = await reconciled(site)
        print(f"pdgate reconcile: {books or 'no difference'}")
    return done, skipped, {"grown_mb_of_those_that_lived_through": grown, "reconcile": books}


async def reconciled(site: Site) -> dict[str, int]:
    """Return what `pdgate reconcile` finds over the run's days, by kind: requests that no worker confirmed are those
    whose workers died before they could write their records."""
    now_s = time.time()
    days = [datetime.fromtimestamp(at_s, UTC).date() for at_s in (now_s - 3600, now_s + 3600)]
    url = site.servers.running[POSTGRES].url
    found = await reconcile_database(url, from_day=days[0], to_day=days[1], now_ms=int(now_s * 1000), grace_s=5)
    return {kind.value: count for kind, count in found.num_differences.items() if count}


def main() -> None:
    """Run what the command line asks for; exit 1 when anything was harmed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=0, help="how many faults; default: each of the plan once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose name has this, as in `link` or `valkey`")
    parser.add_argument("--short", action="store_true", help="the short plan of `make e2e`, in its order")
    parser.add_argument("--add", action="store_true", help="add to the rounds of the last result, as of one long run")
    parser.add_argument("--minutes", type=float, default=0, help="begin no fault after so long")
    parser.add_argument("--old", default="HEAD~1", help="the commit that upgrades come from")
    parser.add_argument("--list", action="store_true", help="print the plan")
    parser.add_argument("--keep", action="store_true", help="leave the logs, and say where")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(fault.name for fault in chosen(asked)))
        return
    folder = Path(tempfile.mkdtemp(prefix="pdgate-chaos-"))
    folder.chmod(0o755)  # PostgreSQL's own user must get in
    began_s = time.monotonic()
    try:
        done, skipped, memory = uvloop.run(bench(asked, folder))
    finally:
        if asked.keep:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    run = {
        "command": f"python -m benches.chaos {' '.join(sys.argv[1:])}".strip(),
        "faults": len(done),
        "seconds": round(time.monotonic() - began_s),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} cores, {platform.system()}, load average {os.getloadavg()[0]:.1f}",
        "at_the_end": memory,
    }
    earlier = json.loads(report.RESULTS.read_text()) if asked.add and report.RESULTS.exists() else {}
    result = report.summary(
        [*msgspec.convert(earlier.get("rounds", []), list[Round]), *done],
        about={"skipped": skipped, "runs": [*earlier.get("runs", []), run]},
    )
    print(json.dumps({key: result[key] for key in ("faults", "lost", "doubled", "wrong", "kept", "recovery_s")}))
    if not asked.only and not asked.short and done:
        report.RESULTS.write_text(report.text_of(result))
        report.main()
    bad = [one.fault for one in done if one.account.bad]
    raise SystemExit(f"{len(bad)} of {len(done)} faults did harm: {', '.join(sorted(set(bad)))}" if bad else 0)


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    return asked.stdout.strip()


if __name__ == "__main__":
    main()
