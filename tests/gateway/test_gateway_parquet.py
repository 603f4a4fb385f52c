"""Usage and costs as Parquet, read back by DuckDB and by pyarrow, compared with what the API says."""

import io
import sys
from decimal import Decimal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gateway_rig import Rig
from test_gateway_organization import COSTS, DAY, USAGE, ask, bill, now_s  # noqa: F401 - fixtures

from contracts.dimensions import Dimensions
from contracts.rating import Tokens
from gateway.parquet import MEDIA_TYPE

MEASURES = ("num_model_requests", "prefill_computed", "prefill_cached", "decode", "cost_nano")


async def fetched(rig, path, tmp_path, **query):
    """The file of an export, on disk."""
    answer = await rig.client.get(path, params=query, headers={"accept": MEDIA_TYPE})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    file = tmp_path / "export.parquet"
    file.write_bytes(answer.content)
    return file


def sums(file, *columns):
    picked = ", ".join(f"sum({name})::bigint" for name in columns)
    (row,) = duckdb.sql(f"SELECT {picked} FROM read_parquet('{file}')").fetchall()
    return row


async def test_a_file_holds_every_page_with_the_totals_of_the_api(rig: Rig, bill, now_s, tmp_path):  # noqa: F811
    first = now_s // DAY * DAY - DAY
    for hour in range(0, 60, 5):
        await bill(first + hour * 3600, Tokens(prefill_computed=hour, prefill_cached=3, decode=7), batch=hour % 2 == 0)
    span = {"start_time": first, "end_time": first + 3 * DAY, "bucket_width": "1h"}
    groups = {"group_by[]": ["model", "batch"]}
    file = await fetched(rig, USAGE, tmp_path, **span, **groups)
    page = await ask(rig, USAGE, **span, **groups, limit=168)
    results = [result for bucket in page["data"] for result in bucket["results"]]
    assert len(results) == 12
    assert sums(file, *MEASURES) == (
        sum(one["num_model_requests"] for one in results),
        *(sum(one["pdgate"][name] for one in results) for name in MEASURES[1:]),
    )
    rows = duckdb.sql(f"""
        SELECT epoch(bucket_start)::bigint, epoch(bucket_end)::bigint, model, batch, decode, project_id, currency
        FROM read_parquet('{file}') ORDER BY 1
    """).fetchall()
    assert rows == [
        (b["start_time"], b["end_time"], r["model"], r["batch"], r["output_tokens"], None, "EUR")
        for b in page["data"] for r in b["results"]
    ]  # fmt: skip
    assert pq.ParquetFile(file).num_row_groups == 3, "a page of 24 hours each"


async def test_types_are_exact(rig: Rig, bill, now_s, tmp_path):  # noqa: F811
    await bill(now_s, Tokens(prefill_computed=1, prefill_cached=1, decode=1))  # 100 + 20 + 400 nano-units
    file = await fetched(rig, USAGE, tmp_path, start_time=now_s, end_time=now_s + 60)
    schema = pq.read_schema(file)
    assert schema.field("bucket_start").type == pa.timestamp("us", tz="UTC")
    assert {schema.field(name).type for name in MEASURES} == {pa.int64()}
    assert schema.field("cost").type == pa.decimal128(28, 9)
    (row,) = pq.read_table(file).to_pylist()
    assert (row["cost"], row["cost_nano"]) == (Decimal("0.000000520"), 520)
    assert row["bucket_start"].timestamp() == now_s // DAY * DAY


async def test_costs_as_a_file_are_those_of_the_api(rig: Rig, bill, now_s, tmp_path):  # noqa: F811
    first = now_s // DAY * DAY - DAY
    for day in range(2):
        await bill(first + day * DAY + 60, Tokens(prefill_computed=1_000, decode=10 + day))
    query = {"start_time": first, "end_time": first + 2 * DAY, "group_by[]": "line_item"}
    file = await fetched(rig, COSTS, tmp_path, **query, limit=1)
    page = await ask(rig, COSTS, **query)
    wanted = [
        (bucket["start_time"], one["line_item"], one["quantity"], one["amount"]["nano"])
        for bucket in page["data"] for one in bucket["results"]
    ]  # fmt: skip
    found = duckdb.sql(f"""
        SELECT epoch(bucket_start)::bigint, line_item, quantity, amount_nano FROM read_parquet('{file}')
    """).fetchall()
    assert found == wanted
    (whole,) = duckdb.sql(f"SELECT sum(amount) FROM read_parquet('{file}')").fetchall()
    assert whole == (Decimal(sum(nano for *_, nano in wanted)) / 10**9,)
    assert pq.ParquetFile(file).num_row_groups == 2, "limit=1: a day each"


async def test_a_file_of_no_usage_has_its_columns_and_no_rows(rig: Rig, bill, now_s, tmp_path):  # noqa: F811
    file = await fetched(rig, USAGE, tmp_path, start_time=now_s, end_time=now_s + 60)
    assert duckdb.sql(f"SELECT count(*), count(cost) FROM read_parquet('{file}')").fetchall() == [(0, 0)]
    assert set(MEASURES) < set(pq.read_schema(file).names)


async def test_a_row_group_leaves_before_the_next_page_is_read(rig: Rig, bill, now_s, monkeypatch):  # noqa: F811
    """Memory holds one page: reading and writing take turns."""
    first = now_s // DAY * DAY - DAY
    for day in range(3):
        await bill(first + day * DAY, Tokens(decode=day + 1), dimensions=Dimensions(user=f"user {day}"))
    steps = []
    reports = rig.gateway.usage_reports
    read = reports.used

    async def seen(org, span):
        steps.append("read")
        return await read(org, span)

    monkeypatch.setattr(reports, "used", seen)
    query = {"start_time": [str(first)], "end_time": [str(first + 3 * DAY)], "limit": ["1"], "group_by": ["user_id"]}
    whole = b""
    async for group in await rig.gateway.parquet.usage(rig.org.id, query, only_project=None):
        steps.append("written")
        whole += group
    assert steps == ["read", "written"] * 3 + ["written"], "the last is the footer"
    assert pq.read_table(io.BytesIO(whole)).column("user_id").to_pylist() == ["user 0", "user 1", "user 2"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"bucket_width": "2h"}, "bucket_width"),
        ({"group_by": "colour"}, "group_by"),
        ({"bucket_width": "1m", "start_time": 0, "end_time": 3_000_060}, "start_time"),
    ],
)
async def test_a_question_that_makes_no_sense_has_a_status_and_no_file(rig: Rig, query, param):
    asked = {"start_time": 0, "end_time": DAY} | query
    answer = await rig.client.get(USAGE, params=asked, headers={"accept": MEDIA_TYPE})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_without_pyarrow_the_answer_says_so(rig: Rig, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = await rig.client.get(USAGE, params={"start_time": 0, "end_time": DAY}, headers={"accept": MEDIA_TYPE})
    assert answer.status_code == 406
    assert answer.json()["error"]["code"] == "parquet_not_installed"
