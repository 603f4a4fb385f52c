"""The bars of the scheduling policy, in simulation: `python -m benches.scheduler_bars [--row NAME] [--seeds N]`.

Each row is a load that the policy has to master beside the best static split in hindsight (all three roles, found by
search), always-unified, a queue threshold and a load planner (our own reading of published rules). Loads of seeds from
100 on were never looked at while the policy was tuned. Every run is kept in `--kept` and not played again until the
code it depends on changes, so an interrupted command goes on where it was. `--ours` plays the policy's own runs only,
a tenth of the work, and keeps the results of all that the controller has no part in.
"""

import argparse
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benches.bar_loads import ANSWERS, BATCH, PROMPTS, ROWS, WORKERS, Row, of_regime, quiet_alone
from benches.bar_placement import PlacementCost, placement_cost
from benches.bar_runs import BIN_S, Run, Runner, best_of
from scheduler.policy.queueing import Split
from scheduler.simulator.play import Policy, first_split
from scheduler.simulator.setup import Placer

RESULTS = Path(__file__).with_name("results") / "scheduler_bars.json"
KEPT = Path(".bars")
FIRST_SEED = 100
RIVALS = (Policy.UNIFIED, Policy.THRESHOLD, Policy.PLANNER)
RECOVERED = 0.95  # of the best static split's share of met targets
RECOVERY_BINS = 6


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One row under one seed. Attainments are shares of feasible requests, refused ones missed, 0 to 1."""

    row: str
    seed: int
    requests: int
    auto: float
    flips: int
    auto_end: str
    static: float
    """Best static split of all roles, in hindsight."""
    static_split: str
    pair: float
    """Best static split of pairs alone."""
    pair_split: str
    rivals: dict[str, float] = {}
    rival_flips: dict[str, int] = {}
    oracle: float | None = None
    """Each regime under its own best static split, without any change from one to the other."""
    plain: float | None = None
    """Best static split whose requests go to the least loaded pair in order of arrival."""
    plain_split: str = ""
    dissolved: float | None = None
    """From the policy's first split to always-unified, beginning in the first second."""
    recovery_s: float | None = None
    """From the start until windows of a minute hold 95 % of the best static split's; None = not in the run."""
    course: list[float] = []
    """Attainment of the policy by arrival, bins of 10 s."""
    static_course: list[float] = []


class BatchMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """Batch lines beside interactive load."""

    seed: int
    grouped_tokens_per_s: float
    fifo_tokens_per_s: float
    interactive: float
    interactive_alone: float


class TenantsMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant beside one that sends ten times as much."""

    seed: int
    beside: float
    alone: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The file of results."""

    workers: int = WORKERS
    rows: list[Measured] = []
    batch: list[BatchMeasured] = []
    tenants: list[TenantsMeasured] = []
    placement: PlacementCost | None = None


def measure(runner: Runner, row: Row, seed: int) -> Measured:
    """Play a row under all policies."""
    auto = runner.policy(row, seed, Policy.AUTO)
    runs = runner.statics(row.name, row.load, seed, row.hand_off)
    split, static = best_of(runs)
    pair_split, pair = best_of(runs, pairs_only=True)
    rivals: dict[Policy, Run] = {
        rival: runner.policy(row, seed, rival) for rival in RIVALS if rival is not Policy.UNIFIED
    }
    rivals[Policy.UNIFIED] = runs[Split(unified=WORKERS)]
    plain_split, plain = None, None
    if row.plain:
        plain_split, plain = best_of(runner.statics(row.name, row.load, seed, row.hand_off, placer=Placer.LEAST_LOADED))
    return Measured(
        row=row.name,
        seed=seed,
        requests=auto.requests,
        auto=auto.attainment,
        flips=auto.flips,
        auto_end=auto.end,
        static=static.attainment,
        static_split=str(split),
        pair=pair.attainment,
        pair_split=str(pair_split),
        rivals={rival.value: run.attainment for rival, run in rivals.items()},
        rival_flips={rival.value: run.flips for rival, run in rivals.items()},
        oracle=_oracle(runner, row, seed) if row.regimes else None,
        plain=plain.attainment if plain is not None else None,
        plain_split=str(plain_split or ""),
        dissolved=_dissolved(runner, row, seed).attainment if row.dissolved else None,
        recovery_s=_recovery_s(auto.course, static.course) if row.first is not None else None,
        course=_shares(auto),
        static_course=_shares(static),
    )


def measure_again(runner: Runner, row: Row, before: Measured) -> Measured:
    """Play a row under the policy only; what others did, and the best static split, stay as they were found."""
    auto = runner.policy(row, before.seed, Policy.AUTO)
    numbers = [number for number, _ in auto.course]
    static = [(number, round(share * number)) for number, share in zip(numbers, before.static_course, strict=False)]
    return msgspec.structs.replace(
        before,
        auto=auto.attainment,
        flips=auto.flips,
        auto_end=auto.end,
        recovery_s=_recovery_s(auto.course, static) if row.first is not None else None,
        course=_shares(auto),
    )


def _dissolved(runner: Runner, row: Row, seed: int) -> Run:
    split = first_split(Policy.AUTO, WORKERS, row.hand_off)
    return runner.run(row.name, row.load, seed, Policy.STATIC, split, hand_off=row.hand_off, dissolving=True)


def _oracle(runner: Runner, row: Row, seed: int) -> float:
    met = requests = 0.0
    share = {PROMPTS.name: PROMPTS.rate_rps, ANSWERS.name: ANSWERS.rate_rps}
    for name, rate_rps in share.items():
        _, best = best_of(runner.statics(f"regime {name}", of_regime(name), seed, row.hand_off))
        met += best.attainment * rate_rps
        requests += rate_rps
    return met / requests


def _shares(run: Run) -> list[float]:
    return [round(met / number, 4) if number else 1.0 for number, met in run.course]


def _recovery_s(auto: list[tuple[int, int]], static: list[tuple[int, int]]) -> float | None:
    """Return the first time from which on every minute's arrivals do 95 % as well as under the best static split."""
    last = min(len(auto), len(static)) - RECOVERY_BINS
    holds_from: int | None = None
    for first in range(last, -1, -1):
        window = slice(first, first + RECOVERY_BINS)
        met, best = (sum(met for _, met in course[window]) for course in (auto, static))
        if met < RECOVERED * best:
            break
        holds_from = first
    return holds_from * BIN_S if holds_from is not None else None


def measure_batch(runner: Runner, row: Row, seed: int) -> BatchMeasured:
    """Play batch lines in groups and in order of arrival, and the interactive load alone."""
    split = first_split(Policy.AUTO, WORKERS, row.hand_off)
    split = Split(prefill=split.prefill - 1, decode=split.decode - 1, unified=split.unified + 2)
    grouped = runner.run(row.name, row.load, seed, Policy.STATIC, split)
    fifo = runner.run(row.name, row.load, seed, Policy.STATIC, split, group_batches=False)
    alone = runner.run(
        f"{row.name} alone",
        lambda number: [arrival for arrival in row.load(number) if arrival.tier != BATCH.tier],
        seed,
        Policy.STATIC,
        split,
    )
    return BatchMeasured(
        seed=seed,
        grouped_tokens_per_s=grouped.batch_tokens_per_s,
        fifo_tokens_per_s=fifo.batch_tokens_per_s,
        interactive=grouped.attainment,
        interactive_alone=alone.attainment,
    )


def measure_tenants(runner: Runner, row: Row, seed: int) -> TenantsMeasured:
    """Play the quiet tenant beside the loud one, and alone."""
    beside = runner.run(row.name, row.load, seed, Policy.AUTO, first_split(Policy.AUTO, WORKERS, row.hand_off))
    alone = runner.run(
        f"{row.name} alone", quiet_alone, seed, Policy.AUTO, first_split(Policy.AUTO, WORKERS, row.hand_off)
    )
    return TenantsMeasured(seed=seed, beside=beside.tenants["quiet"], alone=alone.tenants["quiet"])


def main() -> None:
    """Play what is asked for and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benches.scheduler_bars", description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=[row.name for row in ROWS] + ["placement"], help="only this row")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per row (default 3), from 100 on")
    parser.add_argument("--development", action="store_true", help="seeds from 1 on: those the policy was tuned on")
    parser.add_argument("--ours", action="store_true", help="the policy's own runs only, beside the others' results")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--kept", type=Path, default=KEPT, help="directory of finished runs")
    parser.add_argument("--budget", type=float, default=840.0, help="stop before a row after so many seconds")
    options = parser.parse_args()
    console = Console(highlight=False)
    runner = Runner(options.kept, lambda text: console.print(text, style="dim"))
    first = 1 if options.development else FIRST_SEED
    seeds = range(first, first + (1 if options.quick else options.seeds))
    found = msgspec.json.decode(RESULTS.read_bytes(), type=Found) if RESULTS.exists() else Found()
    started_s = time.monotonic()
    for seed in seeds:
        for row in ROWS:
            if options.row not in (None, row.name):
                continue
            if time.monotonic() - started_s > options.budget:
                console.print(f"stopped before {row.name}, seed {seed}: run the same command again")
                return
            found = _with(found, runner, row, seed, ours=options.ours)
            if not options.development:
                RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if options.row in (None, "placement") and not options.ours:
        found = msgspec.structs.replace(found, placement=placement_cost())
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    show(found, console)


def _with(found: Found, runner: Runner, row: Row, seed: int, *, ours: bool) -> Found:
    before = next((m for m in found.rows if (m.row, m.seed) == (row.name, seed)), None)
    if ours and row.name == "batch":
        return found
    if row.name == "batch":
        batch = [*(b for b in found.batch if b.seed != seed), measure_batch(runner, row, seed)]
        return msgspec.structs.replace(found, batch=sorted(batch, key=lambda b: b.seed))
    if row.name == "tenants":
        tenants = [*(t for t in found.tenants if t.seed != seed), measure_tenants(runner, row, seed)]
        return msgspec.structs.replace(found, tenants=sorted(tenants, key=lambda t: t.seed))
    names = [one.name for one in ROWS]
    measured = measure_again(runner, row, before) if ours and before is not None else measure(runner, row, seed)
    rows = [*(m for m in found.rows if m is not before), measured]
    return msgspec.structs.replace(found, rows=sorted(rows, key=lambda m: (names.index(m.row), m.seed)))


def show(found: Found, console: Console) -> None:
    """Print the results as a table."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (
        "row",
        "seed",
        "auto",
        "flips",
        "best static",
        "best pairs",
        "unified",
        "threshold",
        "planner",
        "more",
    ):
        table.add_column(column)
    for m in found.rows:
        more = f"oracle {m.oracle:.1%}" if m.oracle is not None else ""
        more += f"plain {m.plain:.1%} {m.plain_split}" if m.plain is not None else ""
        more += f"dissolved {m.dissolved:.1%}" if m.dissolved is not None else ""
        more += f"recovered {m.recovery_s:.0f} s" if m.recovery_s is not None else ""
        table.add_row(
            m.row, str(m.seed), f"{m.auto:.1%}", f"{m.flips} {m.auto_end}", f"{m.static:.1%} {m.static_split}",
            f"{m.pair:.1%} {m.pair_split}", *(f"{m.rivals[r]:.1%} ({m.rival_flips[r]})" for r in RIVALS), more,
        )  # fmt: skip
    console.print(table)
    for b in found.batch:
        gain = b.grouped_tokens_per_s / b.fifo_tokens_per_s if b.fifo_tokens_per_s else 0.0
        console.print(
            f"batch {b.seed}: {b.grouped_tokens_per_s:,.0f} against {b.fifo_tokens_per_s:,.0f} tokens/s ({gain:.2f}x), "
            f"interactive {b.interactive:.1%}, alone {b.interactive_alone:.1%}"
        )
    for t in found.tenants:
        console.print(f"tenants {t.seed}: {t.beside:.1%} beside ten times its load, {t.alone:.1%} alone")
    if found.placement is not None:
        console.print(found.placement)


if __name__ == "__main__":
    main()
