"""`pdgate simulate`: play a trace or a described load against a policy, on a virtual clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from contracts.lifecycle import HandOff
from pdgate.output import show_json
from pdgate.plan.command import parse_target
from pdgate.plan.workload import WorkloadError
from pdgate.preflight import CannotStart
from pdgate.timeline import PlotError, write_plot
from scheduler.policy.queueing import Split
from scheduler.simulator.arrivals import Arrival, Lengths, Workload, faster, poisson, window
from scheduler.simulator.play import Policy, first_split, play
from scheduler.simulator.report import Percentiles, Result, Sample
from scheduler.simulator.setup import Setup
from scheduler.simulator.traces import TraceError, read_trace


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    policy: str
    hand_off: HandOff
    workers: int
    split: str  # at the end
    requests: int
    attainment: float  # met / (met + missed) over feasible, admitted requests, 0.0 to 1.0
    attainment_total: float  # with refused requests as missed
    goodput_rps: float
    flips: int
    refused: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    missed_by_stage: dict[str, int]
    duration_s: float


def simulate(
    *,
    trace: Annotated[Path | None, typer.Option(help="Azure CSV or Mooncake JSONL.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests/s; a trace is stretched or squeezed to it.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Median prompt, without a trace.")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1, help="Median answer, without a trace.")] = 256,
    spread: Annotated[
        float, typer.Option(min=1.0, help="90th percentile over median of both lengths, without a trace.")
    ] = 2.5,
    workers: Annotated[int, typer.Option(min=1, max=512, help="Workers in the pool.")] = 8,
    policy: Annotated[
        str, typer.Option(help="auto, static:P/D or static:P/D/U, unified, threshold or planner.")
    ] = "auto",
    slo: Annotated[str, typer.Option(help='Targets: "ttft=2s,tpot=30ms", either alone, or "none".')] = (
        "ttft=2s,tpot=30ms"
    ),
    hand_off: Annotated[HandOff, typer.Option(help="How KV caches travel.")] = HandOff.DIRECT,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Seconds to play.  [default: the trace, or 600]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the generated load and of the policy's draws.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Attainment, split and queue over time: .svg or .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Play a load against a scheduling policy: the code that production runs, on a virtual clock."""
    try:
        chosen, split = parse_policy(policy, workers, hand_off)
        target = parse_target(slo)
        length_s = duration if duration is not None else (None if trace else 600.0)
        arrivals = _arrivals(trace, rate, prompt_tokens, output_tokens, spread, length_s, seed)
    except (TraceError, WorkloadError, PolicyError) as error:
        raise CannotStart(str(error)) from None
    setup = Setup(split=split, target=target, hand_off=hand_off, seed=seed)
    with _bar(len(arrivals), shown=not as_json) as progress:
        result, simulation = play(arrivals, setup, chosen, progress=progress)
    summary = _summary(result, policy, setup, str(simulation.split()))
    if plot is not None:
        try:
            write_plot(plot, simulation.samples)
        except (PlotError, OSError) as error:
            raise CannotStart(str(error)) from None
    if as_json:
        show_json(summary)
    else:
        _print(summary, simulation.samples)


class PolicyError(ValueError):
    """Not a policy; the message says what is."""


def parse_policy(text: str, workers: int, hand_off: HandOff = HandOff.DIRECT) -> tuple[Policy, Split]:
    """Return the policy and the split it begins with. Raises PolicyError."""
    name, _, counts = text.partition(":")
    try:
        policy = Policy(name)
    except ValueError:
        raise PolicyError(
            f"--policy: {text!r} is not one of auto, static:P/D[/U], unified, threshold, planner"
        ) from None
    if not counts:
        if policy in (Policy.STATIC, Policy.THRESHOLD, Policy.PLANNER) and workers < 2:
            raise PolicyError(f"--policy: {policy.value} needs at least 2 workers")
        return policy, first_split(policy, workers, hand_off)
    parts = counts.split("/")
    if policy is Policy.UNIFIED or not 2 <= len(parts) <= 3 or not all(part.isdigit() for part in parts):
        raise PolicyError(f"--policy: {text!r} is not like static:4/4 or auto:4/3/1 (prefill/decode/unified)")
    prefill, decode, unified = (*map(int, parts), 0)[:3]
    split = Split(prefill=prefill, decode=decode, unified=unified)
    if split.total != workers:
        raise PolicyError(f"--policy: {counts} are {split.total} workers, --workers says {workers}")
    if not unified and not (prefill and decode):
        raise PolicyError(f"--policy: {counts} can serve nothing: it needs a pair or a unified worker")
    return policy, split


def _arrivals(
    trace: Path | None,
    rate: float | None,
    prompt_tokens: int,
    output_tokens: int,
    spread: float,
    length_s: float | None,
    seed: int,
) -> list[Arrival]:
    if trace is None:
        if rate is None:
            raise WorkloadError("give --trace FILE or --rate")
        load = Workload(
            prompt=Lengths(median=prompt_tokens, p90_over_median=spread),
            output=Lengths(median=output_tokens, p90_over_median=spread),
            rate_rps=rate,
        )
        return list(poisson(load, duration_s=length_s or 600.0, seed=seed))
    arrivals = read_trace(trace)
    if rate is not None:
        own_rps = len(arrivals) / max(arrivals[-1].at_s, 1e-3)
        arrivals = list(faster(arrivals, rate / own_rps))
    return list(window(arrivals, from_s=0.0, length_s=length_s if length_s is not None else float("inf")))


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[float, int], None]]:
    """Show how many requests have arrived."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.completed:,.0f} of {task.total:,.0f} requests"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("", total=total)
        yield lambda _, number: progress.update(task, completed=number)


def _summary(result: Result, policy: str, setup: Setup, split: str) -> Summary:
    return Summary(
        policy=policy,
        hand_off=setup.hand_off,
        workers=setup.split.total,
        split=split,
        requests=result.requests,
        attainment=round(result.attainment, 4),
        attainment_total=round(result.attainment_total, 4),
        goodput_rps=round(result.goodput_rps, 3),
        flips=result.flips,
        refused=result.refused,
        ttft_ms=result.ttft_ms,
        tpot_ms=result.tpot_ms,
        missed_by_stage=result.missed_by_stage,
        duration_s=round(result.duration_s, 1),
    )


_ROWS = 12


def _print(summary: Summary, samples: list[Sample]) -> None:
    console = Console(highlight=False)
    figures = Table(box=None, show_header=False, pad_edge=False)
    for name in summary.__struct_fields__:
        value = getattr(summary, name)
        if isinstance(value, Percentiles):
            value = f"p50 {value.p50:,.1f}   p95 {value.p95:,.1f}   p99 {value.p99:,.1f}"
        elif isinstance(value, dict):
            value = ", ".join(f"{stage} {count:,}" for stage, count in value.items()) or "none"
        figures.add_row(name, str(value))
    console.print(figures)
    every = max(1, len(samples) // _ROWS)
    course = Table(box=None, header_style="bold", pad_edge=False, title="over time", title_justify="left")
    for column in ("from", "split", "attainment", "waiting", "KV used"):
        course.add_column(column, justify="right")
    for first in range(0, len(samples), every):
        part = samples[first : first + every]
        ended = sum(sample.ended for sample in part)
        course.add_row(
            f"{part[0].at_s:,.0f} s",
            str(part[-1].split),
            f"{sum(sample.met for sample in part) / ended:.1%}" if ended else "-",
            f"{max(sample.num_waiting for sample in part):,}",
            f"{max(sample.kv_used for sample in part):.0%}",
        )
    console.print(course)
