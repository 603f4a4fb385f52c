"""`pdgate top`: a live view of every pool, from what the schedulers leave in Redis each 5 s. Needs no Prometheus."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contracts.series import PERIOD_S, Point, read_series
from pdgate.connection import open_redis
from pdgate.output import AsJson, data_console, show_json
from pdgate.serving_commands import all_models

_BARS: Final = " ▁▂▃▄▅▆▇█"
_SHOWN: Final = 60
_REFRESH_S: Final = 1.0
_FLIPS_SHOWN: Final = 5


class PoolNow(msgspec.Struct, frozen=True, kw_only=True):
    """The latest point of a pool, and sums over the points shown."""

    pool: str
    now: Point | None
    attainment: float | None
    """Over the points shown, 0 to 1."""
    attainment_with_refused: float | None
    blamed: dict[str, int]


def top(
    pool: Annotated[str | None, typer.Option(help="Only this pool.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    file: Annotated[Path | None, typer.Option("--catalog", help="models.toml.  [default: the stack's]")] = None,
    as_json: AsJson = False,
) -> None:
    """Watch the pools: attainment, blame, queues, split and flips. Ctrl-C ends it."""
    try:
        asyncio.run(_watch(pool, file, once=once, as_json=as_json))
    except KeyboardInterrupt:
        return


async def _watch(pool: str | None, file: Path | None, *, once: bool, as_json: bool) -> None:
    async with open_redis() as redis:
        pools = [pool] if pool else list((await all_models(redis, file)).pools)
        series = {name: await read_series(redis, name, count=_SHOWN) for name in pools}
        if as_json:
            show_json([summary(name, points) for name, points in series.items()])
        elif once:
            data_console().print(picture(series))
        else:
            with Live(picture(series), refresh_per_second=4, screen=True) as live:
                while True:
                    await asyncio.sleep(_REFRESH_S)
                    series = {name: await read_series(redis, name, count=_SHOWN) for name in pools}
                    live.update(picture(series))


def summary(pool: str, points: Sequence[Point]) -> PoolNow:
    """Return what `--json` prints of a pool."""
    met, missed = sum(p.met for p in points), sum(p.missed for p in points)
    refused = sum(p.refused for p in points)
    blamed: Counter[str] = Counter()
    for point in points:
        blamed.update(point.by_stage)
    return PoolNow(
        pool=pool,
        now=points[-1] if points else None,
        attainment=met / (met + missed) if met + missed else None,
        attainment_with_refused=met / (met + missed + refused) if met + missed + refused else None,
        blamed=dict(blamed.most_common()),
    )


def picture(series: dict[str, Sequence[Point]]) -> RenderableType:
    """Return all pools, one panel each."""
    return Group(*(_panel(pool, points) for pool, points in series.items()))


def _panel(pool: str, points: Sequence[Point]) -> Panel:
    if not points:
        return Panel(
            Text("no scheduler has led this pool in the last day", style="dim"),
            title=pool,
            title_align="left",
            expand=False,
        )
    seen, now = summary(pool, points), points[-1]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    rows: list[tuple[str, RenderableType]] = [
        ("attainment", _attainment(seen, points)),
        ("blamed", ", ".join(f"{stage} {number}" for stage, number in seen.blamed.items()) or "nobody"),
        ("waiting", f"{_line([p.num_waiting for p in points])}  {now.num_waiting}, oldest {now.oldest_wait_s:.1f} s"),
        ("prompt work", f"{now.queued_prefill_tokens:,} tokens queued"),
        ("decode", f"{_line([p.decode_use for p in points], most=1.0)}  {now.decode_use:.0%} of the KV memory"),
        ("running", f"{now.num_running}"),
        ("split", f"{now.prefill}P {now.decode}D {now.unified}U → {now.target or '-'}  ({now.mode}: {now.why or '-'})"),
        *(
            [("workers", f"{now.prefill}P{now.decode}D{now.unified}U → {now.desired}  ({now.scale_why})")]
            if now.desired
            else []
        ),
        ("demand", _demand(now)),
        ("flips", _flips(points)),
    ]
    for name, value in rows:
        grid.add_row(name, value)
    degraded = now.rung not in ("", "normal")
    title = f"{pool}  [red]{now.rung}[/red]" if degraded else pool
    return Panel(grid, title=title, title_align="left", border_style="red" if degraded else "none", expand=False)


def _attainment(seen: PoolNow, points: Sequence[Point]) -> str:
    if seen.attainment is None:
        return "no requests"
    text = (
        f"{_line([p.attainment if p.attainment is not None else 0.0 for p in points], most=1.0)}  {seen.attainment:.1%}"
    )
    if seen.attainment_with_refused is not None and seen.attainment_with_refused < seen.attainment:
        text += f", {seen.attainment_with_refused:.1%} with refused requests"
    minutes = len(points) * PERIOD_S / 60
    return f"{text} in {minutes:.0f} min"


def _demand(now: Point) -> str:
    if now.rate_rps is None:
        return "not measured yet"
    goodput = f", {now.goodput_rps:.2f} /s predicted in time" if now.goodput_rps is not None else ""
    return f"{now.rate_rps:.2f} requests/s{goodput}"


def _flips(points: Sequence[Point]) -> str:
    flips = [
        f"{flip.worker_id} {flip.from_role}→{flip.to_role} ({flip.why}{'' if flip.done else ', not done'})"
        for point in points
        for flip in point.flips
    ]
    return "; ".join(flips[-_FLIPS_SHOWN:]) or "none"


def _line(values: Sequence[float], *, most: float | None = None) -> str:
    """Return the values as a line of bars; `most` is a full one, default the largest."""
    top_value = most if most is not None else max(values, default=0)
    if top_value <= 0:
        return _BARS[1] * len(values)
    return "".join(_BARS[min(8, max(1, round(value / top_value * 8)))] for value in values)
