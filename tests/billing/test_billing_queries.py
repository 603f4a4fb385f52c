"""What the gateway and the command line read."""

import json

import pytest
from billing_rig import now_ms, usage_event
from typer.testing import CliRunner

from billing.queries import (
    find_request,
    recent_requests,
    recent_requests_across_tenants,
    usage_totals,
    usage_totals_across_tenants,
)
from contracts.identity import new_rid
from contracts.rating import Meter, Tokens
from contracts.usage import Outcome
from pdgate.cli import app
from pdgate.usage import money, parse_span_s

HOUR_MS = 3_600_000


async def test_a_request_is_found_with_its_meters_by_its_own_organisation_only(rig):
    event = usage_event(reasoning_tokens=7, stream=True)
    await rig.bill(event, usage_event())
    async with rig.engine.connect() as conn:
        found = await find_request(conn, "org_acme", event.rid)
        assert await find_request(conn, "org_other", event.rid) is None
        assert await find_request(conn, "org_acme", new_rid(now_ms())) is None
        assert await find_request(conn, "org_acme", "not an id") is None
        assert await find_request(conn, "org_acme", new_rid(2**48 - 1)) is None
    assert (found.request_id, found.path, found.hand_off, found.outcome) == (event.rid, "pd", "direct", "finished")
    assert [(one.meter, one.tokens, one.cost, one.worker) for one in found.meters] == [
        (Meter.PREFILL_COMPUTED, 100, 10_000, "prefill-1"),
        (Meter.PREFILL_CACHED, 30, 600, "prefill-1"),
        (Meter.DECODE, 50, 20_000, "decode-1"),
    ]
    assert found.cost == 30_600
    assert found.timings == event.timings
    assert (found.reasoning_tokens, found.stream, found.slo_met, found.simulated) == (7, True, True, False)


async def test_a_request_that_was_never_placed_has_no_path_and_no_timings(rig):
    event = usage_event(
        outcome=Outcome.REFUSED, cause="no_capacity", path=None, hand_off=None, timings=None, slo_met=None,
        tokens=Tokens(), finish_reason="", prefill_worker="", decode_worker="",
    )  # fmt: skip
    await rig.bill(event)
    async with rig.engine.connect() as conn:
        found = await find_request(conn, "org_acme", event.rid)
    assert (found.path, found.timings, found.slo_met, found.billable, found.cause) == (
        None,
        None,
        None,
        False,
        "no_capacity",
    )
    assert [one.tokens for one in found.meters] == [0, 0, 0]


async def test_totals_count_from_the_very_millisecond_on(rig):
    since = now_ms() // HOUR_MS * HOUR_MS - HOUR_MS // 2  # in the middle of the previous hour
    before, first, later = (usage_event(at_ms=at) for at in (since - 1, since, since + HOUR_MS // 2))
    await rig.bill(before, first, later, usage_event(org="org_other", at_ms=since), usage_event(
        at_ms=since, outcome=Outcome.INTERRUPTED
    ))  # fmt: skip
    async with rig.engine.connect() as conn:
        totals = await usage_totals(conn, "org_acme", since)
        everybody = await usage_totals_across_tenants(conn, since)
    assert [(one.meter, one.requests, one.tokens, one.billed_tokens, one.cost) for one in totals] == [
        (Meter.PREFILL_COMPUTED, 3, 300, 200, 20_000),
        (Meter.PREFILL_CACHED, 3, 90, 60, 1_200),
        (Meter.DECODE, 3, 150, 100, 40_000),
    ]
    assert {one.organisation for one in everybody} == {"org_acme", "org_other"}


async def test_recent_requests_are_the_newest_first(rig):
    events = [usage_event(at_ms=now_ms() - 60_000 + n, org="org_acme" if n % 2 else "org_other") for n in range(6)]
    await rig.bill(*events)
    async with rig.engine.connect() as conn:
        everybody = await recent_requests_across_tenants(conn, now_ms() - HOUR_MS, 4)
        own = await recent_requests(conn, "org_acme", now_ms() - HOUR_MS)
        assert await recent_requests(conn, "org_acme", now_ms() + 1) == []
    assert [row.request_id for row in everybody] == [event.rid for event in events[:1:-1]]
    assert [row.request_id for row in own] == [events[n].rid for n in (5, 3, 1)]


@pytest.fixture
def run(database_url, catalog_file, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PDGATE_CATALOG", str(catalog_file))
    return lambda *words: CliRunner().invoke(app, words)


async def test_pdgate_usage_prints_totals_and_requests(rig, run):
    import asyncio

    event = usage_event()
    await rig.bill(event, usage_event(org="org_other", outcome=Outcome.INTERRUPTED, cause="worker_lost"))
    printed = await asyncio.to_thread(run, "usage", "--since", "1h", "--json")
    report = json.loads(printed.output)
    (acme,) = [row for row in report["models"] if row["organisation"] == "org_acme"]
    assert acme == {
        "organisation": "org_acme", "model": "tiny", "requests": 1,
        "prefill_computed": 100, "prefill_cached": 30, "decode": 50, "cost_nano": 30_600,
    }  # fmt: skip
    (request,) = [row for row in report["requests"] if row["request_id"] == event.rid]
    assert (request["path"], request["hand_off"], request["outcome"]) == ("pd", "direct", "finished")
    assert [meter["tokens"] for meter in request["meters"]] == [100, 30, 50]
    table = await asyncio.to_thread(run, "usage", "--org", "org_acme")
    assert event.rid in table.output
    assert "0.0000306" in table.output
    assert "org_other" not in table.output
    assert (await asyncio.to_thread(run, "usage", "--since", "yesterday")).exit_code == 2


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("7d", 604_800)])
def test_spans_are_read(text, seconds):
    assert parse_span_s(text) == seconds


def test_money_is_printed_exactly():
    assert [money(nano) for nano in (0, 1, 1_000_000_000, 1_230_000_000, -5)] == [
        "0", "0.000000001", "1", "1.23", "-0.000000005",
    ]  # fmt: skip
