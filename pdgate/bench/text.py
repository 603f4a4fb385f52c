"""A run as one screen of text."""

from rich.console import Console
from rich.table import Table

from contracts.slo import SloTarget
from pdgate.bench.records import Run
from pdgate.bench.summary import Summary

_LEVELS = " ▁▂▃▄▅▆▇█"


def print_run(run: Run, found: list[Summary], console: Console) -> None:
    """Print what was asked, the figures of each step and what the client says of itself."""
    simulated = any(record.simulated for step in run.steps for record in step.records)
    note = "  [bold yellow]simulated engine[/bold yellow]" if simulated else ""
    console.print(f"[bold]{run.model}[/bold] at {run.url}, {run.load}{note}")
    console.print(f"targets: {target_text(run.target)}; TTFT counts from the intended time of each request")
    for one in found:
        console.print()
        console.print(f"[bold]{one.name}[/bold]: {one.requests:,} requests")
        console.print(_latencies(one))
        for line in lines_of(run, one):
            console.print(line)
    for one in found:
        if one.client.invalid_because:
            console.print(f"[bold red]INVALID[/bold red] {one.name}: {one.client.invalid_because}")


def target_text(target: SloTarget) -> str:
    """Return targets in words."""
    named = (
        ("TTFT", target.ttft_ms),
        ("TPOT", target.tpot_ms),
        ("ITL P99", target.itl_p99_ms),
        ("end to end", target.e2e_ms),
    )
    return ", ".join(f"{name} <= {value:g} ms" for name, value in named if value is not None) or "none"


def lines_of(run: Run, one: Summary) -> list[str]:
    """Return the figures that are not latencies, a line each."""
    lines = [
        f"met {one.attainment:.1%}  goodput {one.goodput_rps:.2f} requests/s  {course(one)}",
        (
            f"answered {one.requests_per_s:.2f} requests/s, {one.output_tokens_per_s:,.0f} output and "
            f"{one.prompt_tokens_per_s:,.0f} prompt tokens/s; mean {one.mean_prompt_tokens:,.0f} in, "
            f"{one.mean_output_tokens:,.0f} out{_cached(one)}{_counted(one)}"
        ),
    ]
    if one.cost_nano is not None and one.cost_per_million_output is not None:
        whole = max(1, one.requests - sum(one.errors.values()))
        lines.append(
            f"cost {one.cost_nano / 1e9:,.6f} {run.currency} by {run.priced_by}: "
            f"{one.cost_nano / 1e9 / whole:.6f} a request, {one.cost_per_million_output:,.2f} per million output tokens"
        )
    if one.errors:
        lines.append("errors: " + ", ".join(f"{kind} {count:,}" for kind, count in one.errors.items()))
    seen = one.client
    lines.append(
        f"client: sent {seen.late_p50_ms:.1f} / {seen.late_p99_ms:.1f} ms late (P50 / P99), loop lag P99 "
        f"{seen.lag_p99_ms:.1f} ms, {seen.cpu:.0%} of a core; limit {seen.limit_ms:.0f} ms"
    )
    return lines


def course(one: Summary) -> str:
    """Return the attainment over time as a row of blocks, worst 0 %, best 100 %."""
    return "".join(_LEVELS[round(part.met / part.requests * (len(_LEVELS) - 1))] for part in one.over_time)


def _latencies(one: Summary) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("ms", "P50", "P90", "P95", "P99"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, values in (
        ("TTFT", one.ttft_ms),
        ("TPOT", one.tpot_ms),
        ("ITL", one.itl_ms),
        ("end to end", one.e2e_ms),
    ):
        table.add_row(name, *(f"{values[share]:,.1f}" if values else "-" for share in ("p50", "p90", "p95", "p99")))
    return table


def _cached(one: Summary) -> str:
    return f", {one.cached_share:.0%} of the prompt cached" if one.cached_share else ""


def _counted(one: Summary) -> str:
    return "" if one.counted_by_server == 1.0 else f"; tokens counted by the server in {one.counted_by_server:.0%}"
