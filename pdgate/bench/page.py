"""A run as one self-contained HTML page, and its course as a picture."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pdgate.bench.records import Run
from pdgate.bench.summary import Summary
from pdgate.bench.text import lines_of, target_text
from pdgate.plan.html import STYLE
from pdgate.plan.svg import Line, lines
from pdgate.plan.workload import percentile
from pdgate.timeline import Curve, Panel, PlotError, write_panels

_POINTS = 60


def html_page(run: Run, found: Sequence[Summary]) -> str:
    """Return the page."""
    title = f"pdgate bench: {run.model}, {run.load}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(run.url)}, {escape(run.started)}; targets: {escape(target_text(run.target))}.</p>",
    ]
    body += [
        f"<p><b>INVALID, {escape(one.name)}: {escape(one.client.invalid_because)}</b></p>"
        for one in found
        if one.client.invalid_because
    ]
    for one in found:
        body.append(f"<h2>{escape(one.name)}: {one.requests:,} requests</h2>")
        body.append(_latency_table(one))
        body += [f"<p>{escape(line)}</p>" for line in lines_of(run, one)]
    for name, values in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        curves = _distributions(run, values)
        if curves:
            body.append(f"<h2>{name}: share of the requests within</h2>")
            body.append(lines(curves, x=f"{name}, ms", y="share", y_top=1.0))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def write_course(file: Path, found: Sequence[Summary]) -> None:
    """Write attainment, TTFT and arrivals over time, the steps one after the other. Raises PlotError or OSError."""
    times_s: list[float] = []
    attainment: list[float] = []
    ttft_s: list[float] = []
    arrivals: list[float] = []
    start_s = 0.0
    for one in found:
        width_s = one.over_time[1].from_s - one.over_time[0].from_s if len(one.over_time) > 1 else 1.0
        for part in one.over_time:
            times_s.append(start_s + part.from_s)
            attainment.append(100.0 * part.met / part.requests)
            ttft_s.append((part.ttft_p95_ms or 0.0) / 1000)
            arrivals.append(part.requests / width_s)
        start_s = times_s[-1] + width_s if times_s else 0.0
    if len(times_s) < 2:
        raise PlotError("--plot: the run is too short for a picture")
    write_panels(
        file,
        times_s,
        (
            Panel(title="targets met, %", top=100.0, curves=[Curve(name="met", values=attainment)]),
            Panel(title="TTFT P95, s", top=max(*ttft_s, 1e-3), curves=[Curve(name="TTFT", values=ttft_s)]),
            Panel(title="requests/s", top=max(*arrivals, 1.0), curves=[Curve(name="requests", values=arrivals)]),
        ),
    )


def _distributions(run: Run, field: str) -> list[Line]:
    curves = []
    for step in run.steps[:4]:
        values = sorted(v for r in step.records if (v := getattr(r, field)) is not None and v > 0)
        if len(values) > 1:
            points = [(percentile(values, i / _POINTS), i / _POINTS) for i in range(_POINTS + 1)]
            curves.append(Line(name=step.name, points=points))
    return curves


def _latency_table(one: Summary) -> str:
    shares = ("p50", "p90", "p95", "p99")
    head = "".join(f"<th>{share.upper()}</th>" for share in shares)
    rows = []
    for name, values in (("TTFT", one.ttft_ms), ("TPOT", one.tpot_ms), ("ITL", one.itl_ms), ("end to end", one.e2e_ms)):
        cells = "".join(f"<td>{values[share]:,.1f} ms</td>" if values else "<td>-</td>" for share in shares)
        rows.append(f"<tr><td>{name}</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
