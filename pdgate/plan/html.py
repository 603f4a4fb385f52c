"""A plan as one self-contained HTML page."""

from collections.abc import Iterable, Sequence
from html import escape

from pdgate.plan.decide import WORTH
from pdgate.plan.plan import Plan
from pdgate.plan.sensitivity import SurfacePoint
from pdgate.plan.sharing import carried, price
from pdgate.plan.svg import Line, bars, lines, shade
from pdgate.plan.text import HEADLINES, mixture_lines, money_lines, share, simulation, targets, traffic, workers
from pdgate.plan.workload import Workload

CURVE_POINTS = 60
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2em auto;padding:0 1em;color:#111}
h1{font-size:1.5em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse;width:100%}
td,th{padding:.25em .6em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}
svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#333}.unit{fill:#777}
pre{overflow:auto}.grid{stroke:#e5e5e5}.note{color:#555;font-size:.9em}
@media(prefers-color-scheme:dark){body{background:#111;color:#eee}td,th{border-color:#333}svg text{fill:#ccc}
.grid{stroke:#333}.shaded td{color:#111}.note{color:#aaa}}
"""


def html_report(plan: Plan, workload: Workload) -> str:
    """Return the page."""
    asked = f"{plan.model} on {plan.fleet}, {targets(plan)}, {plan.planned_rps:.2f} requests/s"
    body = [
        f"<h1>{escape(HEADLINES[plan.verdict])}</h1>",
        f"<p><b>{escape(plan.reason)}.</b></p>",
        f"<p>{escape(asked)}. {escape(traffic(plan))}.</p>",
        *_run(plan),
        "<h2>Options</h2>",
        _option_bars(plan),
        _option_table(plan),
        "<h2>Traffic</h2>",
        _lengths(workload),
        _hits(plan),
        _rhythm(plan),
        *_sensitivity(plan),
        *_surface(plan),
        "<h2>Assumptions</h2><ul>" + "".join(f"<li>{escape(a)}</li>" for a in plan.assumptions) + "</ul>",
        carried(plan),
    ]
    title = f"pdgate plan: {plan.verdict}, {plan.model} on {plan.fleet}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _run(plan: Plan) -> Iterable[str]:
    if plan.expected is None:
        return
    lead = "The cheapest fleet that works" if plan.verdict == "infeasible" else "Run"
    yield f"<p>{lead}: <b>{escape(workers(plan))}</b>, good for {plan.capacity_rps:.2f} requests/s.</p>"
    seen = plan.expected
    rows = [
        [name, f"{p.p50:.0f} ms", f"{p.p95:.0f} ms", f"{p.p99:.0f} ms"]
        for name, p in (("TTFT", seen.ttft_ms), ("TPOT", seen.tpot_ms))
    ]
    yield f"<h2>Expected: {seen.attainment:.1%} of the requests meet both targets</h2>"
    yield _table(["", "P50", "P95", "P99"], rows)
    yield "".join(f"<p>{escape(line)}</p>" for line in money_lines(plan))
    if plan.simulation is not None:
        words = simulation(plan.simulation)
        yield f"<p>{escape(words[0].upper() + words[1:])}.</p>"
    yield f'<p class="note">Runs out first: {escape(plan.binding)}.</p>'
    yield "".join(f"<p>{escape(line[0].upper() + line[1:])}.</p>" for line in mixture_lines(plan))


def _option_bars(plan: Plan) -> str:
    rows = [(o.name, o.capacity_rps, f"{o.capacity_rps:.2f}") for o in plan.options]
    return bars(rows, unit=f"requests/s that keep the targets for {plan.attainment:.0%}")


def _option_table(plan: Plan) -> str:
    rows = [
        [
            o.name,
            o.workers if not o.note else f"{o.workers} ({o.note})",
            f"{o.capacity_rps:.2f}",
            share(o.gain) if o.capacity_rps else "-",
            f"{o.attainment:.0%}",
            price(o),
        ]
        for o in plan.options
    ]
    return _table(["option", "workers", "requests/s", "gain", "attained at the planned rate", "per hour"], rows)


def _lengths(workload: Workload) -> str:
    curves = []
    for name, values in (
        ("prompt tokens", sorted(r.prompt_tokens for r in workload.requests)),
        ("output tokens", sorted(r.output_tokens for r in workload.requests)),
    ):
        last = len(values) - 1
        points = [(float(values[last * i // CURVE_POINTS]), i / CURVE_POINTS) for i in range(CURVE_POINTS + 1)]
        curves.append(Line(name=name, points=points))
    return lines(curves, x="tokens", y="share of requests", y_top=1.0)


def _hits(plan: Plan) -> str:
    points = plan.workload.prefix_hits
    if len(points) < 2:
        return '<p class="note">The traffic carries no prefix information.</p>'
    rows = [[f"{p.cache_tokens:,} tokens" if p.cache_tokens else "unlimited", f"{p.hit:.1%}"] for p in points]
    return _table(["prefix cache", "hit share of prompt tokens"], rows)


def _rhythm(plan: Plan) -> str:
    """Drift, burstiness and the daily curve."""
    seen = plan.workload
    rows = [
        [f"{d.window_s:.0f} s", "input:output ratio, P95 over P5", f"{d.p95_over_p5:.2f}"]
        for d in seen.drift
        if d.p95_over_p5 is not None
    ]
    rows += [[f"{b.window_s:.0f} s", "arrivals, variance over mean", f"{b.dispersion:.2f}"] for b in seen.bursts]
    table = _table(["window", "what moves", ""], rows)
    if not seen.hourly:
        return table
    return table + bars(
        [(f"hour {hour}", rate, f"{rate:.2f}") for hour, rate in enumerate(seen.hourly)], unit="rate over the mean"
    )


def _sensitivity(plan: Plan) -> Iterable[str]:
    found = plan.sensitivity
    if found is None:
        return
    low, high = share(plan.goodput_gain_low), share(plan.goodput_gain_high)
    yield "<h2>What the gain depends on</h2>"
    yield f"<p>Gain of the best split {share(plan.goodput_gain)}; {low} to {high} within the fit's errors.</p>"
    rows = [
        (c.change + (" (changes the answer)" if c.flips else ""), 100 * c.gain, share(c.gain))
        for c in found.cases
        if c.gain is not None
    ]
    yield bars(rows, unit="goodput gain of a split, %")
    curve = [(p.gigabytes_per_s, p.capacity_rps) for p in found.network]
    yield "<h2>Network</h2>"
    yield lines([Line(name="split, requests/s", points=curve)], x="GB/s per prefill worker", y="requests/s")


def _surface(plan: Plan) -> Iterable[str]:
    if not plan.surface:
        return
    yield "<h2>Break-even: gain by prompt length, rate and network</h2>"
    yield '<p class="note">In each cell the gain, and the requests/s that the better fleet of that size serves.</p>'
    for network in dict.fromkeys(p.network for p in plan.surface):
        name = f"one {network}/s card per worker" if network else "the fleet's own network"
        yield f"<h3>{escape(name[0].upper() + name[1:])}</h3>"
        yield _surface_table([p for p in plan.surface if p.network == network])


def _surface_table(points: Sequence[SurfacePoint]) -> str:
    fleets = sorted({p.gpus for p in points})
    head = "".join(f"<th>{gpus} GPUs</th>" for gpus in fleets)
    rows = []
    for tokens in sorted({p.prompt_tokens for p in points}):
        cells = {p.gpus: p for p in points if p.prompt_tokens == tokens}
        line = f"<td>{tokens:,.0f} uncached tokens</td>"
        for gpus in fleets:
            point = cells.get(gpus)
            line += _cell(point.split_rps, point.unified_rps) if point else "<td></td>"
        rows.append(f"<tr>{line}</tr>")
    return f'<table class="shaded"><tr><th>prompt</th>{head}</tr>{"".join(rows)}</table>'


def _cell(split_rps: float, unified_rps: float) -> str:
    if unified_rps <= 0:
        return f'<td style="background:{shade(float(split_rps > 0), threshold=WORTH)}">{split_rps:.2f}/s</td>'
    gain = split_rps / unified_rps - 1
    return (
        f'<td style="background:{shade(gain, threshold=WORTH)}">{gain:+.0%}, {max(split_rps, unified_rps):.2f}/s</td>'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines_ = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines_}</table>"
