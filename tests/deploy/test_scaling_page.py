"""docs/scaling.md says what the measurements come to."""

import itertools
import json
import re

import pytest

from benches.scaling import FULL, RATES, RESULTS, limit_table, measured, size, size_table
from tests.processes import REPOSITORY


def test_the_tables_are_those_of_the_measurements():
    page, costs = (REPOSITORY / "docs" / "scaling.md").read_text(), measured()
    for table in (limit_table(costs), size_table(costs)):
        assert table in page, "run `make docs`"


def test_a_request_costs_what_its_one_token_and_its_further_tokens_cost():
    rows = json.loads((RESULTS / "latest.json").read_text())["rows"]
    costs = measured()
    short = rows["1 token, 16 at once"]["pdgate"]["us_per_token_by_process"]["gateway"]
    assert costs.per_request["gateway"] == short
    long = rows["256 streams, 5 ms steps"]["pdgate"]
    tokens = long["cpu_us_per_request"] / long["cpu_us_per_token"]
    together = costs.per_request["gateway"] + tokens * costs.per_token["gateway"]
    assert together == pytest.approx(tokens * long["us_per_token_by_process"]["gateway"])


def test_ten_times_the_load_is_ten_times_the_processes_and_never_less_than_one():
    costs = measured()
    sizes = [size(costs, rate) for rate in RATES]
    assert all(s.gateways >= 1 and s.leaders >= 1 and s.redis >= 1 and s.billing >= 1 for s in sizes)
    for small, large in itertools.pairwise(sizes):
        assert large.gateways <= 10 * small.gateways
    assert sizes[-1].postgres_cores == pytest.approx(
        1e6 * 3 * costs.per_meter_row["postgres"] / 1e6 / FULL
    )  # cores, at 60 % each


def test_what_the_page_says_breaks_is_what_the_tables_say():
    page, costs = (REPOSITORY / "docs" / "scaling.md").read_text(), measured()
    rows = {int(row): int(n.replace(",", "")) for row, n in re.findall(r"^\| (\d) \| ([\d,]+) ", page, re.MULTILINE)}
    assert list(rows.values()) == sorted(rows.values())
    # Words are rounded and stay while a figure moves a little; the tables above them are exact.
    for row, count in ((1, "gateways"), (2, "leaders"), (3, "redis")):
        assert getattr(size(costs, round(0.9 * rows[row])), count) == 1, f"row {row}"
        assert getattr(size(costs, round(1.1 * rows[row])), count) == 2, f"row {row}"
    assert size(costs, rows[7]).postgres_cores == pytest.approx(16, rel=0.1)
    at_four = size(costs, rows[4])
    assert at_four.streams == pytest.approx(at_four.gateways * rows[4] / 18.75, rel=0.1)
