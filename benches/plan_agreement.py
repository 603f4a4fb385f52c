"""Closed form against simulation over 60 questions: `python -m benches.plan_agreement`.

Two figures, each with n and a 95 % interval:

* decision: do closed form and simulated production policy agree whether a split gains 30 %? The simulated gain is that
  of the highest rates at which the two fleets keep the targets, searched by bisection.
* ratio: is the simulated goodput of the chosen prefill:decode ratio within 3 % of the best of it and its neighbours?
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benches.plan_cases import Case, answer, cases, workload_of
from pdgate.plan.decide import WORTH
from pdgate.plan.played import simulated_attainment, simulated_rps
from pdgate.plan.shapes import Kind, Shape

RESULTS = Path(__file__).with_name("results") / "plan_agreement.json"
NEAR_BEST = 0.97
NEAR_THRESHOLD = 0.10  # gains this near the threshold are counted apart: either answer is defensible there


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One question."""

    traffic: str
    model: str
    tpot_ms: float
    gain: float | None
    split: str
    simulated_gain: float
    decision_agrees: bool
    near_threshold: bool
    ratio_goodput_of_best: float | None  # 1.0 = the chosen ratio is the best; None = no neighbour


def main() -> None:
    """Play the grid and print both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=1000, help="play so many questions at most")
    options = parser.parse_args()
    rows = []
    for case in list(cases())[: options.limit]:
        row = _row(case, options.requests)
        if row is not None:
            rows.append(row)
            print(msgspec.json.encode(row).decode(), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    _print(rows)


def _row(case: Case, requests: int) -> Row | None:
    choice, setting, traffics = answer(case, requests=requests)
    if choice.unified is None or choice.split is None:
        return None
    split = choice.split[0]
    unified = choice.unified[0]
    workload = workload_of(case, requests=requests)
    rates = [simulated_rps(shape, workload, traffics, setting) for shape in (unified, split)]
    simulated_gain = rates[1] / rates[0] - 1
    at = choice.split[1]
    goodputs = {s.text(): simulated_attainment(s, workload, at, setting) for s in (split, *_neighbours(split))}
    best = max(goodputs.values())
    return Row(
        traffic=case.traffic,
        model=case.model,
        tpot_ms=case.tpot_ms,
        gain=choice.goodput_gain,
        split=split.text(),
        simulated_gain=simulated_gain,
        decision_agrees=(simulated_gain >= WORTH) == (choice.goodput_gain >= WORTH),
        near_threshold=abs(choice.goodput_gain - WORTH) < NEAR_THRESHOLD,
        ratio_goodput_of_best=goodputs[split.text()] / best if len(goodputs) > 1 and best > 0 else None,
    )


def _neighbours(shape: Shape) -> Iterator[Shape]:
    """The same GPUs with one prefill worker more or less."""
    p_worker, d_worker = shape.prefill_worker, shape.decode_worker
    if shape.kind not in (Kind.SPLIT, Kind.STORE) or p_worker is None or d_worker is None:
        return
    gpus = shape.prefill * p_worker.use.gpus + shape.decode * d_worker.use.gpus
    for p in (shape.prefill - 1, shape.prefill + 1):
        d = (gpus - p * p_worker.use.gpus) // d_worker.use.gpus
        if p >= 1 and d >= 1:
            yield msgspec.structs.replace(shape, prefill=p, decode=d)


def _print(rows: list[Row]) -> None:
    table = Table(box=None)
    for column in ("figure", "n", "share", "95 % interval"):
        table.add_column(column)
    clear = [r for r in rows if not r.near_threshold]
    ratios = [r.ratio_goodput_of_best for r in rows if r.ratio_goodput_of_best is not None]
    for name, hits, n in (
        ("decision agrees", sum(r.decision_agrees for r in rows), len(rows)),
        (
            f"decision agrees, gain not within {NEAR_THRESHOLD:.0%} of the rule",
            sum(r.decision_agrees for r in clear),
            len(clear),
        ),
        ("chosen ratio within 3 % of the best", sum(r >= NEAR_BEST for r in ratios), len(ratios)),
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
