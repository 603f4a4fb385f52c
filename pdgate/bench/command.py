"""`pdgate bench`: load against an OpenAI-compatible endpoint, measured at the client."""

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from rich.console import Console

from pdgate.bench.campaign import Campaign, play
from pdgate.bench.compare_command import compare
from pdgate.bench.endpoint import Endpoint, EndpointError, Route
from pdgate.bench.load import Arrivals, Described, Lengths
from pdgate.bench.measurements import FitError, write_measurements
from pdgate.bench.page import html_page, write_course
from pdgate.bench.prices import price_of, priced
from pdgate.bench.records import Run, write_run
from pdgate.bench.summary import Summary, summaries_of
from pdgate.bench.text import print_run
from pdgate.bench.wire import target_of
from pdgate.connection import data_folder
from pdgate.envfile import setting
from pdgate.layout import layout_of
from pdgate.output import show_json
from pdgate.plan.command import parse_target
from pdgate.plan.traces import read_trace
from pdgate.plan.workload import WorkloadError
from pdgate.preflight import CannotStart
from pdgate.timeline import PlotError

EXIT_INVALID: Final = 3
DEFAULT_REQUESTS: Final = 100

bench = typer.Typer(help="Load against an OpenAI-compatible endpoint; `compare` says what differs.")
bench.command("compare")(compare)


@bench.callback(invoke_without_command=True)
def run_bench(
    *,
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="Endpoint.  [default: PDGATE_URL, or the running stack]")] = None,
    key: Annotated[
        str | None, typer.Option(help="API key.  [default: PDGATE_API_KEY, the running stack's, OPENAI_API_KEY]")
    ] = None,
    model: Annotated[str, typer.Option(help="[default: the first of /v1/models]")] = "",
    endpoint: Annotated[Route, typer.Option(help="Which endpoint.")] = Route.CHAT,
    rate: Annotated[str | None, typer.Option(help="Open loop, sessions/s; several as 1,2,4.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Closed loop, users; several as 1,8,64.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Azure CSV, Mooncake JSONL, OpenAI-style log; --rate stretches it.")
    ] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="Gaps of an open loop.")] = Arrivals.POISSON,
    burst_cv: Annotated[float, typer.Option(min=0.0, help="CV of gamma gaps; above 1 comes in bursts.")] = 3.0,
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Mean length of a message.")] = 512,
    prompt_cv: Annotated[float, typer.Option(min=0.0, help="Its spread; 0 = all alike.")] = 0.0,
    output_tokens: Annotated[float, typer.Option(min=1, help="Mean length of an answer.")] = 128,
    output_cv: Annotated[float, typer.Option(min=0.0, help="Its spread.")] = 0.0,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Shared text in front of each session.")] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="How many different ones.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Requests per session, with its history.")] = 1,
    think: Annotated[float, typer.Option(min=0.0, help="Seconds from an answer to the next turn.")] = 0.0,
    length_scale: Annotated[float, typer.Option(min=0.001, help="Factor on a trace's lengths.")] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Sessions per step.  [default: 100, or the trace]")
    ] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds per step.")] = None,
    slo: Annotated[str, typer.Option(help='Targets: "ttft=2s,tpot=30ms", either alone, or "none".')] = "none",
    price: Annotated[
        str | None, typer.Option(help="Per million, if the endpoint names no cost: computed,cached,output.")
    ] = None,
    currency: Annotated[str, typer.Option(help="Of --price.")] = "USD",
    extra: Annotated[str, typer.Option(help="JSON fields for every request's body.")] = "{}",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one answer may take.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 1,
    label: Annotated[str, typer.Option(help="Name of the run in comparisons.  [default: the file's]")] = "",
    out: Annotated[Path | None, typer.Option(help="Results file.  [default: .pdgate/bench/TIME.json]")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Course over time: .svg or .png.")] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Write measurements for `pdgate plan --measured`; needs 3 concurrencies.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one worker, for --fit.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send a load and report latencies, goodput under targets, tokens/s, errors and cost.

    The exit code is 3 when the client itself was too slow for the load, so that the figures say nothing.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        target = parse_target(slo)
        by_price = price_of(price) if price else None
        campaign = Campaign(
            rates=_numbers("--rate", rate, float),
            concurrencies=_numbers("--concurrency", concurrency, int),
            arrivals=arrivals,
            burst_cv=burst_cv,
            trace=read_trace(trace) if trace else None,
            described=Described(
                prompt=Lengths(mean=prompt_tokens, cv=prompt_cv),
                output=Lengths(mean=output_tokens, cv=output_cv),
                prefix_tokens=prefix_tokens,
                prefixes=prefixes,
                turns=turns,
                think_s=think,
                seed=seed,
            ),
            length_scale=length_scale,
            requests=requests if requests or duration or trace else DEFAULT_REQUESTS,
            duration_s=duration,
            deadline_s=timeout,
        )
        if (campaign.concurrencies and campaign.rates) or not (campaign.concurrencies or campaign.rates or trace):
            raise WorkloadError("give --rate for an open loop, --concurrency for a closed one, or --trace")
        env_file = layout_of(data_folder()).env_file
        address = url or setting("PDGATE_URL", env_file)
        if not address:
            raise WorkloadError("give --url, or start a stack with `pdgate up`")
        secret = key or setting("PDGATE_API_KEY", env_file) or os.environ.get("OPENAI_API_KEY") or ""
        server = Endpoint(target_of(address), key=secret, model=model, route=endpoint, extra=_extra(extra))
        started = datetime.now(UTC)
        scale, steps = asyncio.run(play(server, campaign, shown=not as_json))
        charged = [priced(step.records, by_price) for step in steps]
        priced_by = next((by for _, by in charged if by), "")
        run = Run(
            label=label or (out.stem if out else f"{started:%Y%m%dT%H%M%S}"),
            started=started.isoformat(timespec="seconds"),
            url=address,
            model=server.model,
            route=endpoint.value,
            load=campaign.words,
            seed=seed,
            target=target,
            scale=scale,
            dialect=server.dialect,
            currency=_currency(priced_by, currency, [r.currency for records, _ in charged for r in records]),
            priced_by=priced_by,
            steps=[
                msgspec.structs.replace(step, records=records)
                for step, (records, _) in zip(steps, charged, strict=True)
            ],
        )
        file = out or data_folder() / "bench" / f"{started:%Y%m%dT%H%M%S}.json"
        found = summaries_of(run)
        write_run(file, run)
        if html is not None:
            html.write_text(html_page(run, found), encoding="utf-8")
        if plot is not None:
            write_course(plot, found)
        if fit is not None:
            write_measurements(fit, run, gpus=gpus)
    except (EndpointError, FitError, PlotError, ValueError) as error:
        raise CannotStart(str(error)) from None
    _tell(run, found, file, as_json=as_json)
    if any(step.client.invalid_because for step in run.steps):
        raise typer.Exit(EXIT_INVALID)


class Printed(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    file: str
    model: str
    url: str
    load: str
    target: Any
    currency: str
    priced_by: str
    valid: bool
    steps: list[Summary]


def _tell(run: Run, found: list[Summary], file: Path, *, as_json: bool) -> None:
    if as_json:
        valid = not any(one.client.invalid_because for one in found)
        show_json(
            Printed(
                file=str(file),
                model=run.model,
                url=run.url,
                load=run.load,
                target=run.target,
                currency=run.currency,
                priced_by=run.priced_by,
                valid=valid,
                steps=found,
            )
        )
        return
    console = Console(highlight=False)
    print_run(run, found, console)
    console.print(f"\nwritten to {file}", soft_wrap=True)


Number = TypeVar("Number", int, float)


def _numbers(option: str, text: str | None, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    if text is None:
        return ()
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise WorkloadError(f"{option}: {text!r} is not a list of numbers above zero, as 1,2,4")
    return found


def _extra(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WorkloadError(f"--extra: {error}") from None


def _currency(priced_by: str, named: str, told: list[str]) -> str:
    if priced_by == "endpoint":
        return next((currency for currency in told if currency), named)
    return named if priced_by else ""
