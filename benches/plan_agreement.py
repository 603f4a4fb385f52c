"""Closed form against simulation over 60 questions: `python -m benches.plan_agreement`.

Two figures, each with n and a 95 % interval:

* decisions: do closed form and simulated production policy agree whether a split gains 30 %? The simulated gain is that
  of the highest rates at which the two fleets keep the targets, searched by bisection.
* ratios: is the simulated goodput of the chosen prefill:decode ratio within 3 % of the best of it and its neighbours,
  at 1.1 times the rate that the closed form gives it?

A run takes long, so it may be done in pieces (`--minutes 10`): questions that were played with the factors in force and
as many requests are kept, all others are played again.
"""

import argparse
import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benches.plan_cases import Case, answer, cases, workload_of
from pdgate.plan.decide import WORTH
from pdgate.plan.fit import FITTED
from pdgate.plan.played import simulated_attainment, simulated_rps
from pdgate.plan.shapes import Shape

RESULTS = Path(__file__).with_name("results") / "plan_agreement.json"
NEAR_BEST = 0.97
STRESS = 1.1
NEAR_THRESHOLD = 0.10  # gains this near the threshold are counted apart: either answer is defensible there


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One question: the gain of a split by either way."""

    case: Case
    split: str
    gain: float
    simulated_gain: float

    @property
    def agrees(self) -> bool:
        """Whether both are on one side of the rule."""
        return (self.gain >= WORTH) == (self.simulated_gain >= WORTH)


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One question: goodput of the chosen ratio over the best of it and its neighbours, 0 to 1."""

    case: Case
    split: str
    of_best: float
    best: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    played_with: str = ""  # the factors and the number of requests
    decisions: list[Decision] = []
    ratios: list[Ratio] = []
    undecided: list[tuple[str, Case]] = []  # part and question that have no two fleets to compare


def main() -> None:
    """Play what has not been played yet and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["all", "decisions", "ratios"], default="all")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no question after so many")
    options = parser.parse_args()
    asked = played_with(options.requests)
    found = msgspec.json.decode(RESULTS.read_bytes(), type=Found) if RESULTS.exists() else Found()
    if found.played_with != asked:
        found = Found(played_with=asked)
    ends = time.monotonic() + 60 * options.minutes
    for part in ("decisions", "ratios") if options.part == "all" else (options.part,):
        for case in cases():
            if time.monotonic() < ends and not _is_known(found, part, case):
                found = _with(found, part, case, options.requests)
                RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    _print(found)


def played_with(requests: int) -> str:
    """Return what rows must have been played with to be kept: the factors in force and as many requests."""
    return f"factors {hashlib.sha256(FITTED.read_bytes()).hexdigest()[:16]}, {requests} requests"


def _is_known(found: Found, part: str, case: Case) -> bool:
    rows = found.decisions if part == "decisions" else found.ratios
    return (part, case) in found.undecided or any(row.case == case for row in rows)


def _with(found: Found, part: str, case: Case, requests: int) -> Found:
    row = _decision(case, requests) if part == "decisions" else _ratio(case, requests)
    if row is None:
        return msgspec.structs.replace(found, undecided=[*found.undecided, (part, case)])
    print(msgspec.json.encode(row).decode(), flush=True)
    return msgspec.structs.replace(found, **{part: [*getattr(found, part), row]})


def _decision(case: Case, requests: int) -> Decision | None:
    choice, setting, traffics = answer(case, requests=requests)
    if choice.unified is None or choice.split is None:
        return None
    workload = workload_of(case, requests=requests)
    shapes = choice.unified[0], choice.split[0]
    unified, split = (simulated_rps(shape, workload, traffics, setting) for shape in shapes)
    return Decision(case=case, split=shapes[1].text(), gain=choice.goodput_gain, simulated_gain=split / unified - 1)


def _ratio(case: Case, requests: int) -> Ratio | None:
    choice, setting, _ = answer(case, requests=requests)
    if choice.split is None:
        return None
    chosen, capacity = choice.split
    neighbours = list(_neighbours(chosen))
    if not neighbours:
        return None
    workload = workload_of(case, requests=requests)
    rate = STRESS * capacity
    goodputs = {s.text(): simulated_attainment(s, workload, rate, setting) for s in (chosen, *neighbours)}
    best = max(goodputs, key=lambda text: goodputs[text])
    own = chosen.text()
    return Ratio(case=case, split=own, of_best=goodputs[own] / max(goodputs[best], 1e-9), best=best)


def _neighbours(shape: Shape) -> Iterator[Shape]:
    """The same GPUs with one prefill worker more or less."""
    p_worker, d_worker = shape.prefill_worker, shape.decode_worker
    if p_worker is None or d_worker is None:
        return
    gpus = shape.prefill * p_worker.use.gpus + shape.decode * d_worker.use.gpus
    for p in (shape.prefill - 1, shape.prefill + 1):
        d = (gpus - p * p_worker.use.gpus) // d_worker.use.gpus
        if p >= 1 and d >= 1:
            yield msgspec.structs.replace(shape, prefill=p, decode=d)


def _print(found: Found) -> None:
    table = Table(box=None)
    for column in ("figure", "n", "share", "95 % interval"):
        table.add_column(column)
    clear = [d for d in found.decisions if abs(d.gain - WORTH) >= NEAR_THRESHOLD]
    for name, hits, n in (
        ("decisions agree", sum(d.agrees for d in found.decisions), len(found.decisions)),
        (f"the same, gain not within {NEAR_THRESHOLD:.0%} of the rule", sum(d.agrees for d in clear), len(clear)),
        ("chosen ratio within 3 % of the best", sum(r.of_best >= NEAR_BEST for r in found.ratios), len(found.ratios)),
    ):
        low, high = wilson(hits, n)
        table.add_row(name, str(n), f"{hits / n:.0%}" if n else "-", f"{low:.0%} to {high:.0%}")
    Console().print(table)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share."""
    if n == 0:
        return 0.0, 1.0
    z, p = 1.96, hits / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return centre - half, centre + half


if __name__ == "__main__":
    main()
