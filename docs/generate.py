"""Writes the pages and parts of pages that follow from code and measurements.

These are the lifecycles in docs/architecture.md, tables of docs/scaling.md, docs/planner.md, docs/autoscaling.md,
docs/scheduler.md and docs/performance.md, and all of docs/configuration.md.
`make docs` runs it; `make check` (`--check`) and a test compare the pages with what this would write.
"""

import ast
import importlib
import json
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from benches.autoscale_paper import read_paper, table_of_paper
from benches.autoscale_report import read, table_of_days, table_of_steady_load
from benches.plan_tables import agreement_table, choices_table, mocker_table, pairs_table, peers_table
from benches.referee.found import read as read_referee
from benches.referee.table import grid_table, release_table
from benches.scale_table import box_table
from benches.scaling import limit_table, measured, size_table
from contracts.lifecycle import REQUEST_NEXT, WORKER_NEXT, RequestState, WorkerState

ARCHITECTURE = Path(__file__).with_name("architecture.md")
SCALING = Path(__file__).with_name("scaling.md")
AUTOSCALING = Path(__file__).with_name("autoscaling.md")


def diagram(first: StrEnum, moves: Mapping[StrEnum, frozenset[StrEnum]]) -> str:
    """Return a table of moves as a Mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for state, targets in moves.items():
        lines += [f"    {state} --> {target}" for target in type(first) if target in targets]
        if not targets:
            lines.append(f"    {state} --> [*]")
    return "\n".join([*lines, "```"])


def lifecycles() -> str:
    """Return both diagrams with their headings."""
    request = diagram(RequestState.QUEUED, REQUEST_NEXT)
    worker = diagram(WorkerState.STARTING, WORKER_NEXT)
    return f"### A request, as the scheduler sees it\n\n{request}\n\n### A worker\n\n{worker}"


def rewritten(page: str, part: str, text: str) -> str:
    """Return the page with one generated part made anew. Raises ValueError for a page without the part's marks."""
    begin, end = f"<!-- {part}: begin (make docs) -->", f"<!-- {part}: end -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"no {begin} … {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def scaling(page: str) -> str:
    """Return docs/scaling.md with the tables that follow from benches/results."""
    costs = measured()
    for part, table in (("limits", limit_table(costs)), ("sizes", size_table(costs)), ("box", box_table())):
        page = rewritten(page, part, table)
    return page


PLANNER = Path(__file__).with_name("planner.md")
PLANNER_TABLES = {
    "measured pairs": pairs_table,
    "mocker": mocker_table,
    "peer runs": peers_table,
    "peer choices": choices_table,
    "agreement": agreement_table,
}


def planner(page: str) -> str:
    """Return docs/planner.md with the tables that follow from benches/results."""
    for part, table in PLANNER_TABLES.items():
        page = rewritten(page, part, table())
    return page


def autoscaling(page: str) -> str:
    """Return docs/autoscaling.md with the tables that follow from benches/results."""
    figures = read()
    page = rewritten(rewritten(page, "days", table_of_days(figures)), "steady", table_of_steady_load(figures))
    return rewritten(page, "paper", table_of_paper(read_paper()))


SCHEDULER = Path(__file__).with_name("scheduler.md")


def scheduler(page: str) -> str:
    """Return docs/scheduler.md with the tables of the referee."""
    found = read_referee()
    for release in ("1.4.2", "1.6.1"):
        page = rewritten(page, f"referee {release}", release_table(found, release))
    return rewritten(page, "planner grid", grid_table(found))


PERFORMANCE = Path(__file__).with_name("performance.md")
PEERS = Path(__file__).parent.parent / "benches" / "results" / "peers.json"


def performance(page: str) -> str:
    """Return docs/performance.md with the table of other gateways, as `python -m benches.peers` left it."""
    return rewritten(page, "peers", json.loads(PEERS.read_text())["markdown"])


CONFIGURATION = Path(__file__).with_name("configuration.md")
ROOT = Path(__file__).parent.parent
PROCESSES = (("gateway", "GATEWAY_"), ("scheduler", "SCHEDULER_"), ("workers", "WORKER_"), ("billing", "BILLING_"))
HEAD = """# Configuration

Written by `make docs` from the settings of each process. Every process reads its own variables; an unknown or bad one
with its prefix stops it with the variable's name. A list is separated by commas. Models, prices and targets are in
`models.toml` (`contracts/catalog.py` describes it; `pdgate models check` tells what is wrong with it). `pdgate up` sets
what is required, and passes on what it finds in its own environment.
"""


def settings_of(package: str, prefix: str) -> str:
    """Return the table of one process's variables, from its class `Settings`."""
    source = (ROOT / package / "settings.py").read_text()
    settings = importlib.import_module(f"{package}.settings").Settings
    fields = {field.name: field for field in msgspec.structs.fields(settings)}
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Settings").body
    rows = ["| Variable | Type | Default | Means |", "|---|---|---|---|"]
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, kind = node.target.id, _kind(ast.unparse(node.annotation))
        meaning = _meaning(source.splitlines(), node, after)
        rows.append(f"| `{prefix}{name.upper()}` | {kind} | {_default(fields[name])} | {meaning} |")
    return "\n".join(rows)


def _default(field: msgspec.structs.FieldInfo) -> str:
    """Return a default as an operator would write it."""
    if field.default_factory is not msgspec.NODEFAULT:
        return "a new UUID"
    if field.default is msgspec.NODEFAULT:
        return "required"
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None or value in ((), ""):
        return "none"
    return (
        f"`{value:g}`" if isinstance(value, float) else f"`{str.__str__(value) if isinstance(value, str) else value}`"
    )


def _kind(annotation: str) -> str:
    """Return a type in words."""
    literal = re.search(r"Literal\[(.*?)\]", annotation)
    if literal:
        return ", ".join(f"`{word.strip(chr(39))}`" for word in literal[1].split(", "))
    words = (
        ("Url", "URL"), ("Secret", "secret"), ("tuple", "list"), ("bool", "true or false"), ("Path", "path"),
        ("Port", "port"), ("Role", "`prefill`, `decode`, `unified`"), ("HandOff", "`direct`, `store`"),
        ("StoreKind", "`file`, `mooncake`"), ("LogLevel", "`DEBUG`, `INFO`, `WARNING`, `ERROR`"),
        ("Seconds", "seconds > 0"),
        ("PositiveCount", "whole number > 0"), ("int", "whole number"), ("NotNegative", "number >= 0"),
        ("Positive", "number > 0"), ("float", "number"),
    )  # fmt: skip
    return next((said for word, said in words if word in annotation), "text")


def _meaning(lines: list[str], node: ast.AnnAssign, after: ast.stmt | None) -> str:
    """Return what is written beside a field or below it."""
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return " ".join(str(after.value.value).split())
    _, _, comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
    return comment.strip()


def configuration() -> str:
    """Return the page of all settings."""
    tables = [f"## `{prefix}*`: {package}\n\n{settings_of(package, prefix)}\n" for package, prefix in PROCESSES]
    return f"{HEAD}\n" + "\n".join(tables)


def main() -> None:
    """Write the pages, or with --check exit 1 when one is out of date."""
    wanted = {
        ARCHITECTURE: rewritten(ARCHITECTURE.read_text(), "lifecycles", lifecycles()),
        SCALING: scaling(SCALING.read_text()),
        AUTOSCALING: autoscaling(AUTOSCALING.read_text()),
        PLANNER: planner(PLANNER.read_text()),
        SCHEDULER: scheduler(SCHEDULER.read_text()),
        PERFORMANCE: performance(PERFORMANCE.read_text()),
        CONFIGURATION: configuration(),
    }
    if "--check" in sys.argv:
        old = [page.name for page, text in wanted.items() if not page.exists() or page.read_text() != text]
        sys.exit(f"out of date: docs/{', docs/'.join(old)}: run make docs" if old else 0)
    for page, text in wanted.items():
        page.write_text(text)


if __name__ == "__main__":
    main()
