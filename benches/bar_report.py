"""Tables and pictures of `docs/scheduler.md` from the results of the bars: `python -m benches.bar_report`."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from benches.bar_loads import ROWS, TARGET, WORKERS
from benches.scheduler_bars import FIRST_SEED, RESULTS, Found, Measured
from pdgate.raster import Raster
from pdgate.timeline import write_plot
from scheduler.simulator.play import Policy, first_split, play
from scheduler.simulator.setup import Setup
from scheduler.simulator.simulation import Simulation

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "scheduler.md"
PICTURES = DOCS / "pictures"
BEGIN, END = "<!-- bars -->\n", "<!-- end of bars -->\n"
PICTURED = ("regimes-600",)
_SIDE, _MARGIN = 320, 44


def report(found: Found) -> str:
    """Return the tables in Markdown."""
    lines = [
        "| Load | seeds | policy | flips | best static | best pairs | unified | threshold | planner | else |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *_rows(found.rows),
        "",
    ]
    for b in found.batch:
        gain = b.grouped_tokens_per_s / b.fifo_tokens_per_s if b.fifo_tokens_per_s else 0.0
        lines.append(
            f"* Batch, seed {b.seed}: {b.grouped_tokens_per_s:,.0f} tokens/s in groups, {b.fifo_tokens_per_s:,.0f} in "
            f"order of arrival: {gain:.2f} times; interactive {b.interactive:.1%}, alone {b.interactive_alone:.1%}."
        )
    lines.extend(
        f"* Two tenants, seed {t.seed}: {t.beside:.1%} in time beside ten times its load, {t.alone:.1%} alone."
        for t in found.tenants
    )
    if found.placement is not None:
        p = found.placement
        lines.append(
            f"* Placement, {p.workers} workers, {p.blocks:,} blocks: p50 {p.p50_ms:.3f} ms, p99 {p.p99_ms:.3f} ms "
            f"of CPU; {p.index_bytes_per_block:.0f} B a block; {p.blocks_after_ten_times_as_many:,} kept of 1,100,000."
        )
    return "\n".join(lines) + "\n"


def _rows(measured: Sequence[Measured]) -> Iterator[str]:
    for name in dict.fromkeys(m.row for m in measured):
        of_row = [m for m in measured if m.row == name]
        more = []
        if of_row[0].oracle is not None:
            ratio = fmean(m.auto / m.oracle for m in of_row if m.oracle)
            more.append(f"{ratio:.1%} of the oracle per regime")
        plain = [m for m in of_row if m.plain is not None]
        if plain:
            splits = "/".join(m.plain_split for m in plain)
            more.append(f"best static with plain placement {fmean(m.plain or 0.0 for m in plain):.1%} {splits}")
        dissolved = [m.dissolved for m in of_row if m.dissolved is not None]
        if dissolved:
            more.append(f"all-unified from the first second on {fmean(dissolved):.1%}")
        recoveries = [m.recovery_s for m in of_row]
        if any(row.name == name and row.first is not None for row in ROWS):
            more.append("recovered after " + ", ".join("never" if s is None else f"{s:.0f} s" for s in recoveries))
        rivals = (
            f"{fmean(m.rivals[r] for m in of_row):.1%} ({'/'.join(str(m.rival_flips[r]) for m in of_row)})"
            for r in (Policy.UNIFIED, Policy.THRESHOLD, Policy.PLANNER)
        )
        cells = (
            name,
            ", ".join(str(m.seed) for m in of_row),
            f"**{fmean(m.auto for m in of_row):.1%}**",
            "/".join(str(m.flips) for m in of_row),
            f"{fmean(m.static for m in of_row):.1%} {'/'.join(m.static_split for m in of_row)}",
            f"{fmean(m.pair for m in of_row):.1%} {'/'.join(m.pair_split for m in of_row)}",
            *rivals,
            "; ".join(more),
        )
        yield "| " + " | ".join(cells) + " |"


def draw() -> None:
    """Play a few rows once more and write their course, and the calibration of the length forecast."""
    PICTURES.mkdir(exist_ok=True)
    for row in ROWS:
        if row.name in (*PICTURED, "conversation"):
            split = row.first or first_split(Policy.AUTO, WORKERS, row.hand_off)
            setup = Setup(split=split, target=TARGET, hand_off=row.hand_off, seed=FIRST_SEED)
            _, simulation = play(row.load(FIRST_SEED), setup, Policy.AUTO)
            if row.name in PICTURED:
                write_plot(PICTURES / f"{row.name}.png", simulation.samples)
            else:
                (PICTURES / "length-calibration.png").write_bytes(calibration_picture(simulation))


def calibration_picture(simulation: Simulation) -> bytes:
    """Return, as PNG, the share of answers below each decile of their forecast; the diagonal is perfect."""
    shares = simulation.router.lengths.calibration()
    raster = Raster(_SIDE + 2 * _MARGIN, _SIDE + 2 * _MARGIN)

    def place(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + x * _SIDE, _MARGIN + (1 - y) * _SIDE

    for part in range(5):
        at = part / 4
        raster.line([place(0, at), place(1, at)], "#dddddd", width=1)
        raster.text(*place(-0.02, at), f"{at:.2g}", "#333333", anchor="end")
        raster.text(place(at, 0)[0], place(0, 0)[1] + 18, f"{at:.2g}", "#333333", anchor="middle")
    raster.line([place(0, 0), place(1, 1)], "#888888", width=1)
    below, points = 0.0, [place(0, 0)]
    for index, share in enumerate(shares):
        below += share
        points.append(place((index + 1) / 10, below))
    raster.line(points, "#2563eb", width=2)
    raster.text(_MARGIN, _MARGIN - 14, "answers below their forecast quantile", "#333333", anchor="start")
    return raster.png()


def main() -> None:
    """Write the tables, and the pictures if asked."""
    parser = argparse.ArgumentParser(prog="python -m benches.bar_report")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures again, too (about a minute)")
    if parser.parse_args().pictures:
        draw()
    found = msgspec.json.decode(RESULTS.read_bytes(), type=Found)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + report(found) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
