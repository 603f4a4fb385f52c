"""`pdgate plan`: should prefill and decode be split for this traffic, how, and what does it cost."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from contracts.catalog import CatalogError, read_catalog
from contracts.roofline import DTYPE_BYTES, Accelerator
from contracts.slo import SloTarget
from pdgate.output import show_json
from pdgate.plan.calibration import calibrated, calibration_of, read_measurements
from pdgate.plan.compare import LocalModel
from pdgate.plan.described import PRESETS, Description, preset_workload, sample
from pdgate.plan.experts import Hits, read_hits
from pdgate.plan.fit import ENGINES, FITTED, fitted
from pdgate.plan.hardware import accelerators, find_accelerator, parse_gpus
from pdgate.plan.html import html_report
from pdgate.plan.models import find_model
from pdgate.plan.money import Prices
from pdgate.plan.plan import Plan, make_plan
from pdgate.plan.question import Question
from pdgate.plan.scheduler_file import scheduler_toml
from pdgate.plan.sharing import read_report, without_money
from pdgate.plan.speculation import parse_speculation
from pdgate.plan.text import print_plan
from pdgate.plan.traces import read_trace
from pdgate.plan.workload import Workload, WorkloadError, mean
from pdgate.preflight import CannotStart

DEFAULT_TARGET = SloTarget(ttft_ms=2000, tpot_ms=50)
TARGET = re.compile(r"(ttft|tpot)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)")


def plan(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="Azure CSV, Mooncake JSONL, OpenAI-style request log or decision log.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"Traffic without a trace: {', '.join(PRESETS)}.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests/s; a trace or preset is stretched to it.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option(help="Mean prompt length.")] = None,
    output_tokens: Annotated[float | None, typer.Option(help="Mean answer length.")] = None,
    prompt_cv: Annotated[float, typer.Option(help="Spread of prompt lengths (CV).")] = 1.0,
    output_cv: Annotated[float, typer.Option(help="Spread of answer lengths (CV).")] = 1.0,
    arrival_cv: Annotated[float, typer.Option(help="Burstiness of arrivals (CV); 1 = Poisson.")] = 1.0,
    prefix_reuse: Annotated[float, typer.Option(help="Share of prompt tokens seen before, 0 to 1.")] = 0.0,
    turns: Annotated[int, typer.Option(help="Requests per session; the reuse is then its own history.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the described traffic.")] = 1,
    model: Annotated[str, typer.Option(help="Catalogue name, Hugging Face id or a config.json.")] = "llama-3-70b",
    gpus: Annotated[str, typer.Option(help='Fleet: "8xH100", or two kinds: "4xH100,8xL40S".')] = "8xH100",
    slo: Annotated[str | None, typer.Option(help='Targets: "ttft=2s,tpot=30ms", either alone, or "none".')] = None,
    attainment: Annotated[float, typer.Option(min=0.5, max=0.999, help="Share that must meet both.")] = 0.9,
    weights: Annotated[
        str | None, typer.Option(help=f"Format: {', '.join(DTYPE_BYTES)}.  [default: the model's]")
    ] = None,
    kv: Annotated[str, typer.Option(help="KV cache: bf16 or fp8 (FP8 changes answers slightly).")] = "bf16",
    engine: Annotated[str, typer.Option(help="sglang, vllm or trtllm.")] = "sglang",
    speculate: Annotated[
        str | None, typer.Option(help='Speculative decoding: "accept=0.7,tokens=3,draft=0.05".')
    ] = None,
    expert_parallel: Annotated[bool, typer.Option(help="Try whole experts on each GPU for mixtures.")] = True,
    expert_hits: Annotated[
        Path | None, typer.Option(help="JSON of tokens by layer and expert in prefill and decode.")
    ] = None,
    expert_copies: Annotated[int, typer.Option(min=0, help="Additional copies of hot experts per layer.")] = 0,
    network: Annotated[
        str, typer.Option(help="Hand-off link per worker: nvlink, 200Gb, 25GB.  [default: by fleet]")
    ] = "",
    mixing: Annotated[float, typer.Option(min=1.0, help="Cost of a mixed-in prompt over its cost alone.")] = 1.1,
    peak: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Busiest hour over the mean; sizes the fleet.  [default: the daily curve's, else 1]"
        ),
    ] = None,
    daily: Annotated[
        str | None, typer.Option(help='Rate by hour, any unit: "1,1,2,5,...".  [default: a long trace\'s own]')
    ] = None,
    growth: Annotated[float, typer.Option(help="Factor on the traffic.")] = 1.0,
    price: Annotated[list[str] | None, typer.Option(help="Your price per GPU and hour: H100=2.40.")] = None,
    currency: Annotated[str, typer.Option(help="Of all prices.")] = "USD",
    network_cost: Annotated[float, typer.Option(help="Network, per hour.")] = 0.0,
    operations_cost: Annotated[float, typer.Option(help="Operations, per hour.")] = 0.0,
    sell: Annotated[
        str | None, typer.Option(help='Price book per million: "computed,cached,decode", or models.toml:MODEL.')
    ] = None,
    hardware: Annotated[Path | None, typer.Option(help="Your accelerators, TOML.")] = None,
    fit: Annotated[Path | None, typer.Option(help="Your fitted factors, TOML.")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="CSV of your own TPOT measurements on the first kind of GPU; calibrates the fit."),
    ] = None,
    other_hardware: Annotated[bool, typer.Option(help="Try other GPUs for decode at the same price.")] = True,
    local_model: Annotated[
        str, typer.Option(help='Small model for the hybrid option: name or config.json; "none" leaves it out.')
    ] = "qwen3-8b",
    local_tokens: Annotated[int, typer.Option(min=1, help="Prompts of at most so many tokens go to it.")] = 512,
    simulation: Annotated[bool, typer.Option(help="Play the fleets under the production policy too.")] = True,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the scheduler's starting configuration.")] = None,
    money: Annotated[bool, typer.Option(help="Prices, costs and margin; leave them out of what you share.")] = True,
    show: Annotated[
        Path | None, typer.Option(help="Print a plan that was shared: its page or its JSON. Nothing is computed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether to split prefill and decode for this traffic, how, and what it costs."""
    try:
        if show is not None:
            shared = read_report(show)
            _print(shared if money else without_money(shared), as_json=as_json)
            return
        known = _priced(accelerators(hardware), price or [])
        described = Description(
            rate_rps=rate if rate is not None else 0.0,
            prompt_tokens=prompt_tokens or 0.0,
            output_tokens=output_tokens or 0.0,
            prompt_cv=prompt_cv,
            output_cv=output_cv,
            arrival_cv=arrival_cv,
            prefix_reuse=prefix_reuse,
            turns=turns,
            seed=seed,
        )
        workload, usual = _traffic(trace, preset, described)
        if daily is not None:
            workload = msgspec.structs.replace(workload, hourly=_curve(daily))
        found = find_model(model)
        fleet = tuple(parse_gpus(gpus, known))
        question = Question(
            workload=workload,
            shape=found.shape,
            weights=_one_of("--weights", weights or found.weights, tuple(DTYPE_BYTES)),
            kv=_one_of("--kv", kv, ("bf16", "fp8")),
            engine=_one_of("--engine", engine, ENGINES),
            fit=fitted(fit or FITTED),
            fleet=fleet,
            target=parse_target(slo) if slo is not None else usual,
            attainment=attainment,
            network=network,
            mixing=mixing,
            peak=peak if peak is not None else max(workload.hourly, default=1.0),
            growth=growth,
            currency=currency,
            network_per_hour=network_cost,
            operations_per_hour=operations_cost,
            prices=_prices(sell),
            alternatives=tuple(known.values()) if other_hardware else (),
            expert_parallel=expert_parallel,
            expert_copies=expert_copies,
            hits=read_hits(expert_hits, found.shape) if expert_hits is not None else Hits(),
            local=_local(local_model, local_tokens),
            speculation=parse_speculation(speculate) if speculate is not None else None,
        )
        if measured is not None:
            question = _calibrated(measured, question)
        with _bar() as tell:
            answer = make_plan(question, with_simulation=simulation, with_surface=html is not None, progress=tell)
        told = answer if money else without_money(answer)
        for file, text in (
            (html, html_report(told, workload) if html else ""),
            (write, scheduler_toml(answer) if write else ""),
        ):
            if file is not None:
                file.write_text(text, encoding="utf-8")
    except (WorkloadError, OSError) as error:
        raise CannotStart(str(error)) from None
    _print(told, as_json=as_json)


def _print(answer: Plan, *, as_json: bool) -> None:
    if as_json:
        show_json(answer)
    else:
        print_plan(answer, Console(highlight=False))


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that is told what is being done and which share (0 to 1) is."""
    columns = BarColumn(bar_width=30), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}")
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda now, share: bar.update(task, description=now, completed=share)


def parse_target(text: str) -> SloTarget:
    """Return the targets of "ttft=2s,tpot=30ms"; "none" has none.

    Raises:
        WorkloadError: not of that form.
    """
    if text.strip().lower() == "none":
        return SloTarget()
    found: dict[str, float] = {}
    for part in text.lower().split(","):
        match = TARGET.fullmatch(part.strip())
        if match is None or float(match[2]) <= 0 or match[1] in found:
            raise WorkloadError(f"--slo: {text!r} is not like ttft=2s,tpot=30ms")
        found[match[1]] = float(match[2]) * (1000 if match[3] == "s" else 1)
    return SloTarget(ttft_ms=found.get("ttft"), tpot_ms=found.get("tpot"))


def _traffic(trace: Path | None, preset: str | None, described: Description) -> tuple[Workload, SloTarget]:
    """The traffic and the targets that it usually has."""
    if (trace is not None) + (preset is not None) + (described.prompt_tokens > 0) != 1:
        raise WorkloadError(
            "give one of --trace FILE, --preset NAME, or --rate with --prompt-tokens and --output-tokens"
        )
    if trace is None and preset is None:
        return sample(described), DEFAULT_TARGET
    if trace is not None:
        workload, usual = read_trace(trace), DEFAULT_TARGET
    else:
        assert preset is not None
        kind, workload = preset_workload(preset)
        usual = SloTarget(ttft_ms=kind.ttft_ms, tpot_ms=kind.tpot_ms)
    return workload.at_rate(described.rate_rps) if described.rate_rps else workload, usual


def _curve(text: str) -> tuple[float, ...]:
    """The rate of each hour over the mean."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not 2 <= len(rates) <= 24 or min(rates) < 0 or max(rates) <= 0:
        raise WorkloadError(f"--daily: {text!r} is not 2 to 24 rates like 1,1,2,5")
    return tuple(rate / mean(rates) for rate in rates)


def _calibrated(file: Path, question: Question) -> Question:
    """The question with factors moved towards the user's measurements."""
    rows = read_measurements(
        file,
        shape=question.shape,
        gpu=question.fleet[0][1],
        weights=question.weights,
        kv=question.kv,
        engine=question.engine,
    )
    fit, found = calibrated(question.fit, rows), calibration_of(question.fit, rows)
    return msgspec.structs.replace(question, fit=fit, calibration=found)


def _priced(known: dict[str, Accelerator], prices: list[str]) -> dict[str, Accelerator]:
    """The accelerators with the user's prices in place of the defaults."""
    for text in prices:
        name, _, amount = text.partition("=")
        gpu = find_accelerator(name, known)
        try:
            value = float(amount)
        except ValueError:
            raise WorkloadError(f"--price: {text!r} is not like H100=2.40") from None
        known[gpu.name] = msgspec.structs.replace(gpu, price_per_hour=value, price_dated="", price_note="")
    return known


def _prices(text: str | None) -> Prices | None:
    """Selling prices per million tokens: three numbers, or those of a model in a catalogue (FILE:MODEL)."""
    if text is None:
        return None
    file, _, name = text.rpartition(":")
    if file:
        try:
            found = read_catalog(Path(file)).find(name)
        except CatalogError as error:
            raise WorkloadError(f"--sell: {error}") from None
        if found is None:
            raise WorkloadError(f"--sell: {file} has no model {name!r}")
        book = found[1].price
        return Prices(
            prefill_computed=float(book.prefill_computed),
            prefill_cached=float(book.prefill_cached),
            decode=float(book.decode),
        )
    try:
        computed, cached, decode = (float(part) for part in text.split(","))
    except ValueError:
        raise WorkloadError(f"--sell: {text!r} is neither like 0.10,0.02,0.40 nor like models.toml:MODEL") from None
    return Prices(prefill_computed=computed, prefill_cached=cached, decode=decode)


def _local(name: str, up_to_tokens: int) -> LocalModel | None:
    if name.lower() == "none":
        return None
    found = find_model(name)
    return LocalModel(shape=found.shape, weights=found.weights, up_to_tokens=up_to_tokens)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise WorkloadError(f"{option}: {value!r} is not one of {', '.join(known)}")
    return value
