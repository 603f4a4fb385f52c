"""Fuzzing by coverage: `make fuzz`, `python -m benches.fuzz [TARGET ...] [--seconds 60]`.

Each target of `benches/fuzz/targets.py` runs in a process of its own under atheris (libFuzzer), from its seeds and from
what earlier runs found worth keeping in `.fuzz/TARGET`. Bytes that raise anything but the target's refusal are written
to `.fuzz/faults` and end that target; the exit code is 1 then. `--again FILE TARGET` gives a target one file.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benches.fuzz.targets import TARGETS

KEPT = Path(".fuzz")
LONGEST_BYTES = 4096
_MEMORY_MB = 2048
_SLOWEST_S = 10


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="give one target this file and show what it raises")
    asked = parser.parse_args()
    if unknown := set(asked.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if asked.again is not None:
        if len(asked.targets) != 1:
            parser.error("--again needs one target")
        print("taken" if TARGETS[asked.targets[0]](asked.again.read_bytes()) else "refused, as documented")
        return
    bad = [name for name in asked.targets or TARGETS if not fuzz(name, TARGETS[name].seeds, asked.seconds)]
    raise SystemExit(f"faults in {', '.join(bad)}: see {KEPT / 'faults'}" if bad else 0)


def fuzz(name: str, seeds: Sequence[bytes], seconds: int) -> bool:
    """Fuzz a target in its own process; return whether nothing was found."""
    corpus, faults = KEPT / name, KEPT / "faults"
    corpus.mkdir(parents=True, exist_ok=True)
    faults.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    done = subprocess.run(
        [
            sys.executable, "-m", "benches.fuzz.one", name, str(corpus), f"-max_total_time={seconds}",
            f"-max_len={LONGEST_BYTES}", f"-timeout={_SLOWEST_S}", f"-rss_limit_mb={_MEMORY_MB}",
            f"-artifact_prefix={faults / name}-", "-print_final_stats=1",
        ],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )  # fmt: skip
    output = done.stdout + done.stderr
    runs = re.search(r"number_of_executed_units:\s*(\d+)", output)
    covered = re.findall(r"cov: (\d+)", output)
    print(
        f"{name:<12} {int(runs[1]) if runs else 0:>10,} inputs, {covered[-1] if covered else '?':>6} edges, "
        f"{'nothing found' if done.returncode == 0 else 'FAULT'}",
        flush=True,
    )
    if done.returncode:
        print("\n".join(output.splitlines()[-60:]))
    return done.returncode == 0


if __name__ == "__main__":
    main()
