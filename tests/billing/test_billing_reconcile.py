"""Reconciliation finds each way in which the figures can disagree, and nothing when they agree."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from billing_rig import Counted, attempt_records, now_ms, usage_event
from typer.testing import CliRunner

from billing.moments import moment
from billing.reconcile import Kind, drift_ratio, reconcile
from contracts import keys
from contracts.rating import Tokens
from contracts.usage import AttemptRecord, Outcome
from contracts.wire import FIELD
from pdgate.cli import app


@pytest.fixture
async def billed(rig):
    """Ten requests of two organisations, each confirmed by its workers; one interrupted, one retried."""
    events = [usage_event(org=f"org_{n % 2}", tokens=Tokens(prefill_computed=10 + n, decode=n + 1)) for n in range(9)]
    interrupted = usage_event(org="org_0", outcome=Outcome.INTERRUPTED, tokens=Tokens(prefill_computed=5, decode=3))
    await rig.bill(*events, interrupted)
    records = [record for event in events[:-1] for record in attempt_records(event)]
    records += attempt_records(events[-1], reason="error")
    records += attempt_records(events[-1], attempt=2)
    await write(rig, records)
    return events


async def write(rig, records):
    delivery = rig.attempt_consumer(Counted())
    await rig.emit_attempts(*records)
    await rig.consume(delivery, len(records))
    return delivery._count.results


async def compare(rig, *, grace_s=0.0, later_s=3600, organisation=None):
    today = datetime.now(UTC).date()
    async with rig.engine.connect() as conn:
        return await reconcile(
            conn,
            from_day=today - timedelta(days=1),
            to_day=today,
            now_ms=now_ms() + later_s * 1000,
            grace_s=grace_s,
            organisation=organisation,
        )


async def spoil(rig, statement):
    """Change what code never changes, as a bug or a bad hand would."""
    async with rig.engine.begin() as conn:
        await conn.exec_driver_sql("SET LOCAL session_replication_role = replica")  # no triggers
        await conn.exec_driver_sql(statement)


def found_kinds(report):
    return {(one.request_id, one.kind) for one in report.differences}


async def test_figures_that_agree_are_no_drift(rig, billed):
    report = await compare(rig)
    assert report.differences == ()
    assert report.drift is False
    assert {day.organisation for day in report.days} == {"org_0", "org_1"}
    assert sum(day.requests for day in report.days) == 10
    assert sum(day.usage_cost for day in report.days) == sum(event.cost for event in billed)
    assert all(day.agrees for day in report.days)
    assert (await compare(rig, organisation="org_1")).drift is False


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("DELETE FROM billing.usage_record WHERE meter = 'prefill_cached' AND request_id = '{rid}'", Kind.RECORDS),
        (
            "UPDATE billing.usage_record SET cost = cost + 1 WHERE meter = 'decode' AND request_id = '{rid}'",
            Kind.RECORDS,
        ),
        (
            "UPDATE billing.usage_record SET price = price + 1 WHERE meter = 'decode' AND request_id = '{rid}'",
            Kind.PRICE,
        ),
        (
            "UPDATE billing.ledger_entry SET amount = amount + 1 WHERE amount > 0 AND transaction_id = '{rid}'",
            Kind.LEDGER,
        ),
        ("UPDATE billing.request SET answered_cost = 0 WHERE request_id = '{rid}'", Kind.ANSWERED),
        ("DELETE FROM billing.attempt_cost WHERE request_id = '{rid}'", Kind.UNCONFIRMED),
        ("DELETE FROM billing.attempt_cost WHERE phase = 'prefill' AND request_id = '{rid}'", Kind.UNCONFIRMED),
        ("DELETE FROM billing.attempt_cost WHERE phase = 'decode' AND request_id = '{rid}'", Kind.UNCONFIRMED),
        (
            "UPDATE billing.attempt_cost SET completion_tokens = 99 WHERE phase = 'decode' AND request_id = '{rid}'",
            Kind.WORKERS,
        ),
        ("UPDATE billing.attempt_cost SET cached_tokens = 1 WHERE request_id = '{rid}'", Kind.WORKERS),
        ("DELETE FROM billing.request WHERE request_id = '{rid}'", Kind.UNBILLED),
    ],
)
async def test_each_kind_of_difference_names_its_request(rig, billed, statement, kind):
    rid = billed[3].rid
    await spoil(rig, statement.format(rid=rid))
    report = await compare(rig)
    assert report.drift is True
    assert (rid, kind) in found_kinds(report)
    assert {one.request_id for one in report.differences} == {rid}
    if kind is Kind.UNCONFIRMED:
        assert found_kinds(report) == {(rid, kind)}


async def test_a_missing_posting_and_one_without_a_request_are_found(rig, billed):
    lost, other = billed[0].rid, billed[2].rid
    await spoil(rig, f"DELETE FROM billing.ledger_entry WHERE transaction_id = '{lost}'")
    await spoil(rig, f"DELETE FROM billing.request WHERE request_id = '{other}'")
    report = await compare(rig)
    assert {(lost, Kind.LEDGER), (other, Kind.LEDGER), (other, Kind.RECORDS)} <= found_kinds(report)
    assert not all(day.agrees for day in report.days)


async def test_a_rollup_that_differs_is_drift_of_its_tenant_and_day(rig, billed):
    await spoil(rig, "UPDATE billing.usage_hourly SET tokens = tokens + 1 WHERE organisation = 'org_1'")
    report = await compare(rig)
    assert {day.organisation for day in report.days if not day.agrees} == {"org_1"}
    assert report.drift is True


async def test_records_that_may_still_be_under_way_are_not_missed_yet(rig, billed):
    late = usage_event(at_ms=now_ms())
    await rig.bill(late)
    assert (await compare(rig, grace_s=300, later_s=60)).differences == ()
    assert found_kinds(await compare(rig, grace_s=300, later_s=600)) == {(late.rid, Kind.UNCONFIRMED)}


async def test_a_client_that_left_before_any_work_needs_no_workers_word(rig, billed):
    await rig.bill(usage_event(org="org_0", outcome=Outcome.CLIENT_LEFT, tokens=Tokens()))
    assert (await compare(rig)).drift is False


async def test_several_samples_count_the_prompt_once_and_what_was_generated_together(rig):
    event = usage_event(tokens=Tokens(prefill_computed=100, prefill_cached=30, decode=50 + 20))
    await rig.bill(event)
    first, second = attempt_records(event), attempt_records(event, sample=1, cached_tokens=130)
    decode = [AttemptRecord(**{f: getattr(r, f) for f in r.__struct_fields__} | {"completion_tokens": n})
              for r, n in ((first[1], 50), (second[1], 20))]  # fmt: skip
    await write(rig, [first[0], second[0], *decode])
    assert (await compare(rig)).differences == ()


async def test_a_workers_record_that_comes_twice_counts_once_and_a_bad_one_is_buried(rig):
    event = usage_event()
    await rig.redis.xadd(keys.attempts("tiny"), {FIELD: b"\xc1"})
    delivery = rig.attempt_consumer(Counted())
    await rig.emit_attempts(*attempt_records(event), *attempt_records(event))
    await rig.consume(delivery, 5)
    assert delivery._count.results == {"posted": 2, "repeated": 2, "dead_letter": 1}
    assert await rig.redis.xlen(keys.attempts_dead_letters("tiny")) == 1
    row = await rig.one("SELECT * FROM billing.attempt_cost WHERE phase = 'decode'")
    assert (row.worker, row.prompt_tokens, row.cached_tokens, row.completion_tokens) == ("decode-1", 130, 30, 50)


async def test_pdgate_reconcile_exits_1_on_drift(rig, billed, database_url, catalog_file, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PDGATE_CATALOG", str(catalog_file))

    async def run(*words):
        return await asyncio.to_thread(CliRunner().invoke, app, ("reconcile", *words))

    agreed = await run("--json")
    assert (agreed.exit_code, json.loads(agreed.output)["drift"]) == (0, False)
    await spoil(rig, f"UPDATE billing.request SET answered_cost = 0 WHERE request_id = '{billed[0].rid}'")
    drifted = await run()
    assert drifted.exit_code == 1
    assert billed[0].rid in drifted.output
    assert (await run("--day", "today")).exit_code == 2


async def test_a_continued_request_agrees_with_what_its_two_workers_counted(rig):
    """The second attempt's prompt holds what the first had answered; both together are what was billed."""
    event = usage_event(attempts=2, tokens=Tokens(prefill_computed=100, prefill_cached=30, decode=50))
    await rig.bill(event)
    first = attempt_records(event, reason="lost")
    prefill, decode = attempt_records(event, attempt=2, prompt_tokens=150, cached_tokens=130)
    await write(rig, [first[0], prefill, msgspec.structs.replace(decode, completion_tokens=30)])
    report = await compare(rig)
    assert report.differences == ()
    assert (report.days[0].billed_tokens, report.days[0].confirmed_tokens) == (180, 180)


async def test_a_retried_request_is_confirmed_by_the_attempt_that_served_it_alone(rig):
    """The first attempt's prefill worker was killed and took its record with it."""
    event = usage_event(attempts=2)
    await rig.bill(event)
    await write(rig, attempt_records(event, attempt=2))
    report = await compare(rig)
    assert report.differences == ()
    assert report.drift is False


async def test_drift_is_the_largest_difference_of_any_two_books(rig, billed):
    async def drift():
        async with rig.engine.connect() as conn:
            later = now_ms() + 10**6
            return max([await drift_ratio(conn, day, now_ms=later) for day in days])

    days = {moment(now_ms()).date(), moment(now_ms() - 10_000).date()}
    assert await drift() == 0.0
    await spoil(rig, "UPDATE billing.usage_hourly SET cost = cost * 2 WHERE organisation = 'org_1'")
    assert await drift() == 0.5
    await spoil(rig, "DELETE FROM billing.attempt_cost")
    assert await drift() == 1.0
