"""Other gateways beside pdgate, in one run.

Each system is started anew for each round, and the rounds take turns, so that what a busy machine does to one it does
to all. What a system is and what its figures include: benches/peers/systems.py; the loads: benches/peers/loads.py.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benches.__main__ import machine
from benches.peers import faults
from benches.peers.loads import Round, play
from benches.peers.report import figures, losses, markdown, table
from benches.peers.systems import System, systems
from tests.processes import REPOSITORY

RESULTS = REPOSITORY / "benches" / "results" / "peers.json"
FAULTS = RESULTS.with_name("peers_faults.json")


async def one_round(system: System) -> Round:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-peers-"))
    try:
        async with system.start(folder) as running:
            return await play(running)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cause_of(error: BaseException) -> str:
    """Return the first single fault in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def one_fault(system: System) -> faults.Fault:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-peers-"))
    try:
        async with system.start(folder, copies=2) as running:
            return await faults.play(running)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the rounds, print where pdgate loses, then everything, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--only", nargs="*", help="systems whose names begin so; figures are not written")
    parser.add_argument("--faults", action="store_true", help="kill a worker under streams instead of measuring")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes, after each round")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that whatever ends this ends what it started
    chosen = [s for s in systems() if not arguments.only or s.name.startswith(tuple(arguments.only))]
    if arguments.faults:
        write_faults(chosen)
        return
    rounds: dict[str, list[Round]] = {}
    failed: dict[str, str] = {}
    busy: list[float] = []
    found: dict[str, Any] = {}
    for number in range(arguments.repeats):
        for system in chosen:
            start_s = time.monotonic()
            told = ""
            try:
                seen = asyncio.run(one_round(system))
                rounds.setdefault(system.name, []).append(seen)
            except Exception as error:  # noqa: BLE001 - a peer that cannot run here is a finding, not the end
                told = failed[system.name] = f"round {number + 1}: {cause_of(error)}"[:800]
            busy.append(round(os.getloadavg()[0], 1))
            told = told or f"{time.monotonic() - start_s:.0f} s"
            print(f"  round {number + 1} of {arguments.repeats}, {system.name}: {told}", file=sys.stderr, flush=True)
        found = {s.name: figures(rounds[s.name]) for s in chosen if rounds.get(s.name)}
        if not arguments.only:
            write(arguments, chosen, found, failed, busy)
    show(found, failed)


def write_faults(chosen: list[System]) -> None:
    """Print how answers ended when a worker died, and write it beside what is known of the other systems."""
    found: dict[str, Any] = json.loads(FAULTS.read_text())["systems"] if FAULTS.exists() else {}
    for system in chosen:
        try:
            found[system.name] = msgspec.to_builtins(asyncio.run(one_fault(system)))
        except Exception as error:  # noqa: BLE001 - a peer that cannot run here is a finding, not the end
            found[system.name] = {"not_run": cause_of(error)[:800]}
        print(f"{system.name}: {found[system.name]}", flush=True)
    FAULTS.write_text(json.dumps({"systems": found, "machine": machine()}, indent=1) + "\n")


def show(found: dict[str, Any], failed: dict[str, str]) -> None:
    ours = next((name for name in found if name.startswith("pdgate")), None)
    if ours is not None:
        print("Where pdgate loses:")
        print("\n".join(f"  {line}" for line in losses(found, ours)) or "  nowhere")
    for name, why in failed.items():
        print(f"Failed: {name}: {why}")
    Console(width=200).print(table(found))


def write(
    arguments: argparse.Namespace,
    chosen: list[System],
    found: dict[str, Any],
    failed: dict[str, str],
    busy: list[float],
) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    ours = next((name for name in found if name.startswith("pdgate")), None)
    result = {
        "losses": losses(found, ours) if ours is not None else [],
        "systems": {
            s.name: {"protocol": s.protocol, "does": s.does, "command": s.command, **found[s.name]}
            for s in chosen
            if s.name in found
        },
        "failed": failed,  # the last failure; such a round is not among the figures
        "markdown": markdown(found),
        "load_average": busy,  # after each system's round, of all work on the machine
        "commit": commit.stdout.strip(),
        "machine": machine(),
        "command": f"python -m benches.peers --repeats {arguments.repeats}",
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
