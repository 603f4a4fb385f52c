"""The documentation names code that exists, and its diagrams are the code's tables."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt

import billing.settings
import gateway.settings
import scheduler.settings
import workers.settings
from pdgate.cli import app

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
EVERY_PAGE = sorted(
    page
    for page in REPOSITORY.rglob("*.md")
    if not any(part.startswith(".") or part == "node_modules" for part in page.relative_to(REPOSITORY).parts)
)
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
            found |= {f"{node.name}.{n.target.id}" for n in node.body if isinstance(n, ast.AnnAssign)}
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


def load_generate():
    spec = importlib.util.spec_from_file_location("docs_generate", REPOSITORY / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    return generate


def test_the_lifecycles_are_those_of_the_code():
    generate = load_generate()
    page = generate.ARCHITECTURE.read_text()
    assert generate.rewritten(page, "lifecycles", generate.lifecycles()) == page, "run `make docs`"
    assert "queued --> prefilling" in page
    assert "ready --> draining" in page


def test_the_planners_tables_are_those_of_its_benches():
    generate = load_generate()
    assert generate.planner(generate.PLANNER.read_text()) == generate.PLANNER.read_text(), "run `make docs`"


def test_every_make_target_and_command_in_the_readme_exists():
    text = (REPOSITORY / "README.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z0-9-]+)", text)) <= targets
    commands = typer.main.get_command(app).commands
    assert set(re.findall(r"`pdgate ([a-z]+)", text)) <= set(commands)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors_and_links(page):
    """Return the anchors of a page's headings, and what its links and pictures lead to; code is left out."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    anchors, links = set(), []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type != "inline":
            continue
        if before is not None and before.type == "heading_open":
            anchors.add(slug("".join(child.content for child in token.children)))
        links += [child.attrs["href"] for child in token.children if child.type == "link_open"]
        links += [child.attrs["src"] for child in token.children if child.type == "image"]
    return anchors, links


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_link_is_dead(page):
    dead = []
    for link in anchors_and_links(page)[1]:
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors_and_links(file)[0]):
            dead.append(link)
    assert dead == []


def test_every_alert_links_to_a_section_of_the_runbook():
    anchors, _ = anchors_and_links(REPOSITORY / "docs" / "runbook.md")
    rules = (REPOSITORY / "observability" / "rules" / "alerts.yml").read_text()
    named = re.findall(r"runbook: docs/runbook.md#(\S+)", rules)
    assert named
    assert set(named) <= anchors


def test_every_page_is_reached_from_the_readme():
    reached, wanted = set(), [REPOSITORY / "README.md"]
    while wanted:
        page = wanted.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in anchors_and_links(page)[1] if not re.match(r"[a-z]+:", link)]
        wanted += [(page.parent / link).resolve() for link in links if link]
    assert {page for page in PAGES if page.parent.name == "docs"} <= reached


def test_the_configuration_page_has_every_setting():
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert load_generate().configuration() == page, "run `make docs`"
    for settings, prefix in (
        (gateway.settings.Settings, "GATEWAY_"),
        (scheduler.settings.Settings, "SCHEDULER_"),
        (workers.settings.Settings, "WORKER_"),
        (billing.settings.Settings, "BILLING_"),
    ):
        assert [f"`{prefix}{name.upper()}`" in page for name in settings.__struct_fields__].count(False) == 0
