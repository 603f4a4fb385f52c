"""The documentation names code that exists, and its diagrams are the code's tables."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import typer

from pdgate.cli import app

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
REFERENCE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
FILE = re.compile(
    r"`((?:billing|contracts|docs|gateway|migrations|observability|pdgate|requirements|scheduler|workers)/[^\s`*:]+)`"
)


def names_in(file):
    """Return every top-level name of a module, and `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_in_the_documentation_exists(page):
    for file, name in REFERENCE.findall(page.read_text()):
        assert (REPOSITORY / file).exists(), f"{page.name}: {file}"
        assert name in names_in(REPOSITORY / file), f"{page.name}: {file}:{name}"
    for file in FILE.findall(page.read_text()):
        assert (REPOSITORY / file).exists(), f"{page.name}: {file}"


def test_the_path_of_a_request_is_described_end_to_end():
    named = {file.partition("/")[0] for file, _ in REFERENCE.findall((REPOSITORY / "docs/architecture.md").read_text())}
    assert {"gateway", "scheduler", "workers", "billing"} <= named


def test_the_lifecycles_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("docs_generate", REPOSITORY / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = generate.PAGE.read_text()
    assert generate.rewritten(page) == page, "run `make docs`"
    assert "queued --> prefilling" in page
    assert "ready --> draining" in page


def test_every_make_target_and_command_in_the_readme_exists():
    text = (REPOSITORY / "README.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z0-9-]+)", text)) <= targets
    commands = typer.main.get_command(app).commands
    assert set(re.findall(r"`pdgate ([a-z]+)", text)) <= set(commands)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
