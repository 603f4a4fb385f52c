"""Rewrites the generated part of docs/architecture.md: the lifecycles, from contracts.lifecycle.

`make docs` runs it; a test compares what is in the page with what this would write.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from contracts.lifecycle import REQUEST_NEXT, WORKER_NEXT, RequestState, WorkerState

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- lifecycles: begin (make docs) -->", "<!-- lifecycles: end -->"


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


def rewritten(page: str) -> str:
    """Return the page with its generated part made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{lifecycles()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
