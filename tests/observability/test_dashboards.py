"""Dashboards: what Grafana reads is what the code says, and every panel tells what is healthy."""

import json
import re

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.dashboards.build import BOARDS, FOLDER, drawn
from observability.metrics import COUNTERS, GAUGES, HISTOGRAMS
from tests.processes import REPOSITORY

RECORDED = set(
    re.findall(r"^\s+- record: (\S+)$", (REPOSITORY / "observability/rules/recording.yml").read_text(), re.MULTILINE)
)
FROM_THE_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
DECLARED = (
    set(GAUGES)
    | {f"pdgate_{name}_total" for name in COUNTERS}
    | {f"pdgate_{name}_bucket" for name in HISTOGRAMS}
    | RECORDED
    | FROM_THE_PROCESS
)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_committed_json_is_what_the_code_says_and_fits_the_schema(board) -> None:
    text = (FOLDER / f"{board.uid}.json").read_text()
    assert text == drawn(board), "run make dashboards"
    parsed = Dashboard.from_json(json.loads(text))
    assert parsed.title == board.title
    rows = [panel for panel in parsed.panels if panel.type_val == "row"]
    assert len(rows) == len(board.rows)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_query_names_series_that_exist(board) -> None:
    for _, panels in board.rows:
        for panel in panels:
            assert panel.unit
            assert panel.description.endswith(".")
            assert panel.healthy
            for query in panel.queries:
                named = set(re.findall(r"\b(?:pdgate_|process_)[a-z0-9_]+(?::[a-z0-9_]+)?", query.expr))
                assert named, query.expr
                assert named <= DECLARED, f"{panel.title}: {named - DECLARED}"
