"""Every row of docs/known-failures.md names tests that are there."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROWS = [
    line
    for line in (REPOSITORY / "docs" / "known-failures.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| Failure")
]


def names_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_every_known_failure_has_a_test_that_is_there(row: str):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
    assert named, row
    for file, name in named:
        assert name in names_in(REPOSITORY / "tests" / file), f"{file}::{name}"


def test_the_page_has_every_failure_that_we_set_out_to_prove_absent():
    assert len(ROWS) >= 13 + 8 + 11 + 11
