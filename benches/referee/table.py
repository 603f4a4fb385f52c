"""The tables of docs/scheduler.md that follow from the referee's results; `make docs` writes them."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from benches.referee.found import Figure, Found, Measured, best_setting

CLOSE, CLEAR, FEW = 0.01, 0.10, 0.1
"""Never worse than the planner by more; better by so much somewhere; at most so many of its scale events."""


def release_table(found: Found, release: str) -> str:
    """One row for each load in a release of ai-dynamo, over its seeds."""
    loads = found.of_release(release)
    planned = all(row.planners for rows in loads for row in rows)
    heads = ["Load", "seeds", "ours", "flips", "best static", "4P4D", "always-unified"]
    heads += ["Dynamo's planner, best setting", "started or stopped, ours", "its"] if planned else []
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for rows in loads:
        cells = [
            rows[0].load,
            ", ".join(str(row.seed) for row in rows),
            f"**{_mean([row.ratio for row in rows])}**",
            _each(rows, lambda row: row.ratio.decisions),
            f"{_mean([row.statics[row.best_static] for row in rows])} {'/'.join(row.best_static for row in rows)}",
            _mean([row.statics["4P4D"] for row in rows]),
            _mean([row.unified[row.best_unified] for row in rows]),
        ]
        if planned:
            setting = best_setting(rows)
            cells += [
                f"{_mean([row.planners[setting] for row in rows])} {setting}",
                _each(rows, lambda row: row.ratio.moved),
                "/".join(str(row.planners[setting].moved) for row in rows),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_verdicts(loads)]) if planned else "\n".join(lines)


def grid_table(found: Found) -> str:
    """Every setting of the planner's grid: attainment, and workers started or stopped."""
    loads = [rows for rows in found.of_release(_planned(found)) if rows]
    lines = [
        f"| Setting | {' | '.join(rows[0].load for rows in loads)} |",
        f"|---|{'---|' * len(loads)}",
    ]
    for name in found.grid:
        cells = [
            f"{_mean([row.planners[name] for row in rows])} ({'/'.join(str(r.planners[name].moved) for r in rows)})"
            for rows in loads
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for who, figures in (
        ("the best of them, requests/s in time", [[r.planners[best_setting(rows)] for r in rows] for rows in loads]),
        ("ours, requests/s in time", [[r.ratio for r in rows] for rows in loads]),
    ):
        goodputs = (f"{fmean(figure.goodput_rps for figure in of_load):.1f}" for of_load in figures)
        lines.append(f"| {who} | {' | '.join(goodputs)} |")
    return "\n".join(lines)


def _planned(found: Found) -> str:
    """Return the release whose planner was played."""
    return next(row.release for row in found.rows if row.planners)


def ahead(rows: Sequence[Measured], setting: str) -> float:
    """Return by how much (-1 to 1) ours is ahead of a setting of the planner on a load."""
    return fmean(row.ratio.attainment - row.planners[setting].attainment for row in rows)


def _verdicts(loads: Sequence[Sequence[Measured]]) -> Iterator[str]:
    aheads = {rows[0].load: ahead(rows, best_setting(rows)) for rows in loads}
    worst, clearest = min(aheads, key=lambda load: aheads[load]), max(aheads, key=lambda load: aheads[load])
    yield (
        f"* Never worse than the planner by more than {100 * CLOSE:.0f} point: {_met(aheads[worst] >= -CLOSE)}; "
        f"at worst {_points(aheads[worst])}, on {worst}."
    )
    yield (
        f"* Better by at least {100 * CLEAR:.0f} points somewhere: {_met(aheads[clearest] >= CLEAR)}; "
        f"at best {_points(aheads[clearest])}, on {clearest}."
    )
    moved = {rows[0].load: _moves(rows) for rows in loads}
    over = [load for load, (ours, theirs) in moved.items() if ours > FEW * theirs]
    ours, theirs = (sum(pair[side] for pair in moved.values()) for side in (0, 1))
    flips = sum(row.ratio.decisions for rows in loads for row in rows)
    changes = sum(row.planners[best_setting(rows)].decisions for rows in loads for row in rows)
    yield (
        f"* At most a tenth of its scale events: {_met(not over)}{' on ' + ', '.join(over) if over else ''}; "
        f"{ours} workers started or stopped against {theirs} over all loads, {flips} flips against {changes} changes "
        "of a count."
    )
    settings = loads[0][0].planners
    one = max(settings, key=lambda name: fmean(row.planners[name].attainment for rows in loads for row in rows))
    of_one = [ahead(rows, one) for rows in loads]
    yield (
        "* The setting is chosen for each load in hindsight. With one for all loads, the best on average ("
        + one
        + "), "
        f"ours is between {_points(min(of_one))} and {_points(max(of_one))}."
    )


def _moves(rows: Sequence[Measured]) -> tuple[int, int]:
    setting = best_setting(rows)
    return sum(row.ratio.moved for row in rows), sum(row.planners[setting].moved for row in rows)


def _mean(figures: Sequence[Figure]) -> str:
    return f"{100 * fmean(figure.attainment for figure in figures):.1f} %"


def _each(rows: Sequence[Measured], read: Callable[[Measured], int]) -> str:
    return "/".join(str(read(row)) for row in rows)


def _met(holds: bool) -> str:  # noqa: FBT001 (a word for it)
    return "met" if holds else "missed"


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"
