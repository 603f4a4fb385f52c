"""`pdgate why REQUEST_ID`: one request on one screen: its phases, its placements with their reasons, its bill."""

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contracts.catalog import read_catalog
from contracts.slo import SloTarget, Timings
from pdgate.connection import data_folder, open_database, open_redis
from pdgate.layout import catalog_file, layout_of
from pdgate.output import AsJson, data_console, show_json
from pdgate.preflight import CannotStart
from pdgate.story import Bill, Decision, Story, Unknown, rid_of, story_of
from pdgate.usage import money

_BAR: Final = 36
_STYLES: Final = {"queue": "yellow", "prefill": "blue", "transfer": "magenta", "decode": "green", "other": "dim"}

Span = tuple[str, float, float, str]
"""Phase, start and end in ms after the arrival, and a note."""


def why(
    request_id: Annotated[str, typer.Argument(help="x-request-id of an answer, or the answer's own id.")],
    decisions: Annotated[
        Path | None,
        typer.Option(help="Folder of the decision logs.  [default: SCHEDULER_DECISION_LOG, or the stack's]"),
    ] = None,
    file: Annotated[Path | None, typer.Option("--catalog", help="models.toml.  [default: the stack's]")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where a request spent its time, why it was placed where it was, who is to blame, and what it costs."""
    story = asyncio.run(_find(request_id, decisions or decisions_folder(), file or catalog_file()))
    if as_json:
        show_json(story)
    else:
        data_console().print(picture(story))


def decisions_folder() -> Path | None:
    """Return where the stack's scheduler writes its decision logs, if anywhere."""
    if named := os.environ.get("SCHEDULER_DECISION_LOG"):
        return Path(named)
    folder = layout_of(data_folder()).decisions
    return folder if folder.is_dir() else None


async def _find(name: str, decisions: Path | None, catalog: Path) -> Story:
    try:
        rid = rid_of(name)
        async with open_redis() as redis, open_database() as engine, engine.connect() as db:
            return await story_of(rid, redis=redis, db=db, catalog=read_catalog(catalog), decisions=decisions)
    except Unknown as unknown:
        raise CannotStart(str(unknown)) from None


def picture(story: Story) -> RenderableType:
    """Return the screen."""
    parts: list[RenderableType] = [_head(story)]
    if (spans := spans_of(story)) is not None:
        parts.append(_timeline(spans))
    if story.decisions or story.refused:
        parts.append(_placements(story))
    if story.attempts:
        parts.append(_attempts(story))
    if story.bill is not None:
        parts.append(_charge(story.bill, story.currency))
    return Panel(Group(*parts), title=f"request {story.rid}", title_align="left", expand=False)


def _head(story: Story) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    arrived = datetime.fromtimestamp(story.arrived_unix_ms / 1000, UTC).isoformat(timespec="milliseconds")
    grid.add_row("arrived", f"{arrived}, model {story.model or '?'}, tier {story.tier or '?'}, {story.organisation}")
    grid.add_row("status", _status(story))
    if story.bill is not None and story.bill.timings is not None:
        grid.add_row("promised", _promised(story.bill.timings, story.target))
    if story.blamed is not None:
        grid.add_row("blame", _blame(story))
    return grid


def _status(story: Story) -> str:
    bill = story.bill
    if bill is None:
        so_far = f", {story.running_ms / 1000:.1f} s so far" if story.running_ms is not None else ""
        return f"{story.status}{so_far}" + (f": {story.refused}" if story.refused else "")
    ended = bill.outcome + (f" ({bill.cause})" if bill.cause else "")
    parts = [f"{story.status}: {ended}"]
    if bill.finish_reason:
        parts.append(f"finish reason {bill.finish_reason}")
    parts.append(f"settled by {bill.settled_by}")
    if bill.estimated:
        parts.append("counts are estimates")
    if bill.simulated:
        parts.append("simulated text")
    return ", ".join(parts)


def _promised(seen: Timings, target: SloTarget | None) -> str:
    def part(name: str, got_ms: float | None, wanted_ms: float | None) -> str:
        if got_ms is None:
            return ""
        if wanted_ms is None:
            return f"{name} {got_ms:,.0f} ms"
        return f"{name} {got_ms:,.0f} of {wanted_ms:,.0f} ms {'met' if got_ms <= wanted_ms else 'MISSED'}"

    wanted = target or SloTarget()
    parts = [part("TTFT", seen.ttft_ms, wanted.ttft_ms), part("TPOT", seen.tpot_ms, wanted.tpot_ms)]
    if wanted.itl_p99_ms is not None:
        parts.append(part("ITL p99", seen.itl_p99_ms, wanted.itl_p99_ms))
    if wanted.e2e_ms is not None:
        parts.append(part("whole", seen.ttft_ms + seen.decode_ms, wanted.e2e_ms))
    return ", ".join(filter(None, parts))


def _blame(story: Story) -> str:
    said = "nobody: all targets were met" if story.blamed == "none" else str(story.blamed)
    return said + (" (worked out from the bill: no decision log holds it)" if story.blame_from == "timings" else "")


def spans_of(story: Story) -> list[Span] | None:
    """Return the phases in the order of time; None where nothing was measured."""
    bill = story.bill
    if bill is None or bill.timings is None:
        if story.running_ms is None:
            return None
        return _spans_so_far(story, story.running_ms)
    seen, tokens = bill.timings, {meter.meter: meter.tokens for meter in bill.meters}
    computed, cached = tokens.get("prefill_computed", 0), tokens.get("prefill_cached", 0)
    prefill_at = seen.queue_ms
    transfer_at = prefill_at + seen.prefill_ms
    handed_at = transfer_at + seen.transfer_ms
    spans = [
        ("queue", 0.0, prefill_at, "inbox to placed"),
        ("prefill", prefill_at, transfer_at, f"{computed} computed + {cached} cached{_on(bill.prefill_worker)}"),
    ]
    if bill.hand_off is not None and bill.prefill_worker:
        spans.append(("transfer", transfer_at, handed_at, f"{bill.hand_off} hand-off"))
    if seen.ttft_ms - handed_at >= 0.5:
        spans.append(("other", handed_at, seen.ttft_ms, "gateway, waits for memory, first step"))
    end = max(handed_at, seen.ttft_ms) + seen.decode_ms
    note = f"{seen.decode_tokens} tokens, TPOT {seen.tpot_ms:.1f} ms{_on(bill.decode_worker)}"
    return [*spans, ("decode", max(handed_at, seen.ttft_ms), end, note)]


def _spans_so_far(story: Story, so_far_ms: float) -> list[Span]:
    last = story.decisions[-1] if story.decisions else None
    if last is None:
        return [("queue", 0.0, so_far_ms, "still waiting")]
    waited_ms = min(last.waited_ms or 0.0, so_far_ms)
    where = f"on {last.prefill or last.decode}, then {last.decode}" if last.prefill else f"on {last.decode}"
    return [
        ("queue", 0.0, waited_ms, "inbox to placed"),
        ("prefill", waited_ms, so_far_ms, f"prefill or decode {where}"),
    ]


def _on(worker: str) -> str:
    return f" on {worker}" if worker else ""


def _timeline(spans: list[Span]) -> Table:
    whole = max((end for _, _, end, _ in spans), default=0.0) or 1.0
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in ("phase", "bar", "lasted", "note"):
        table.add_column(justify="right" if name == "lasted" else "left", no_wrap=name != "note")
    for phase, start, end, note in spans:
        first = min(_BAR - 1, int(start / whole * _BAR))
        length = max(1, round((end - start) / whole * _BAR))
        bar = Text(" " * first + "█" * min(length, _BAR - first), style=_STYLES[phase], no_wrap=True)
        bar.pad_right(_BAR - len(bar))
        table.add_row(phase, bar, f"{end - start:,.0f} ms", note)
    return table


def _placements(story: Story) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("placed", "path", "workers", "reason", "waited", "hit hoped", "TTFT guess", "step"):
        table.add_column(column)
    for number, decision in enumerate(story.decisions):
        table.add_row(*_placement(decision), end_section=number == len(story.decisions) - 1)
    if story.refused:
        table.add_row("refused", "", "", story.refused)
    return table


def _placement(decision: Decision) -> tuple[str, ...]:
    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f} ms"

    workers = f"{decision.prefill} → {decision.decode}" if decision.prefill else decision.decode
    hoped = "-" if decision.hoped_cached_tokens is None else f"{decision.hoped_cached_tokens:,}"
    return (
        f"attempt {decision.attempt}",
        decision.path,
        workers,
        decision.reason or "not logged yet",
        ms(decision.waited_ms),
        hoped,
        ms(decision.predicted_ttft_ms),
        ms(decision.predicted_step_ms),
    )


def _attempts(story: Story) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (
        "worker counted",
        "phase",
        "worker",
        "ended",
        "prompt",
        "cached",
        "generated",
        "computed for",
        "held",
    ):
        table.add_column(column)
    for row in story.attempts:
        table.add_row(
            f"attempt {row.attempt}" + (f" sample {row.sample}" if row.sample else ""),
            row.phase,
            row.worker,
            row.reason,
            f"{row.prompt_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.completion_tokens:,}",
            f"{row.compute_ms:,.0f} ms",
            f"{row.worker_ms:,.0f} ms",
        )
    return table


def _charge(bill: Bill, currency: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("charged", "tokens", f"{currency} per million", currency, "done by"):
        table.add_column(column, justify="left" if column in ("charged", "done by") else "right")
    for meter in bill.meters:
        table.add_row(meter.meter, f"{meter.tokens:,}", money(meter.price), money(meter.cost), meter.worker or "-")
    table.add_row("sum", "", "", money(bill.cost), "" if bill.cost else "nothing: " + _free(bill), style="bold")
    return table


def _free(bill: Bill) -> str:
    return f"{bill.outcome}{f' ({bill.cause})' if bill.cause else ''} is not charged"
