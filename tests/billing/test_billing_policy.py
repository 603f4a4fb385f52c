"""docs/billing-policy.md, line by line."""

import re
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from billing_rig import TINY, attempt_records, now_ms, usage_event
from hypothesis import given
from hypothesis import strategies as st

from billing.budgets import Budget, Budgets, set_budget
from billing.corrections import Wanted, correct
from billing.events import decode_event, rate_event
from billing.prices import PriceBook, PriceVersion, Terms, set_price
from billing.reconcile import Kind, reconcile
from billing.sweeper import Sweeper
from contracts import keys
from contracts.identity import new_rid
from contracts.lifecycle import Path as ServingPath
from contracts.rating import Meter, Price, Tokens, cost
from contracts.settlement import Reservation, Reserved, SettlementScripts, actual_usage, encode_owner
from contracts.slo import SloTarget
from contracts.units import Nano
from contracts.usage import EMPTY_ANSWER, REPEATED, Outcome
from contracts.wire import Owner, encode

REPOSITORY = Path(__file__).parents[2]
COST = 30_600  # of the rig's event: 100 x 100 + 30 x 20 + 50 x 400 nano-units
BOOK = PriceBook(
    [PriceVersion(price=TINY, organisation=None, from_ms=0, to_ms=None, source="admin", set_by="")], now_ms()
)


def rated(event):
    return rate_event(decode_event(encode(event)), BOOK)


async def charged(rig):
    return await rig.scalar(
        "SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry JOIN billing.account ON id = account_id"
        " WHERE kind = 'receivable'"
    )


def test_every_line_names_a_test_that_is_there():
    page = (REPOSITORY / "docs" / "billing-policy.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    written = set()
    for file in (REPOSITORY / "tests" / "billing").glob("test_*.py"):
        written |= set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), flags=re.MULTILINE))
    assert named <= written
    rows = [line for line in page.splitlines() if line.startswith("|") and not line.startswith(("|---", "| Case"))]
    assert all("`test_" in row for row in rows)
    assert len(rows) > 25


async def test_a_finished_request_pays_its_meters(rig):
    await rig.bill(usage_event())
    assert await charged(rig) == COST


@given(st.tuples(*[st.integers(0, 10**6)] * 3), st.booleans())
def test_a_stream_costs_what_the_same_answer_in_one_piece_costs(counts, batch):
    tokens = Tokens(prefill_computed=counts[0], prefill_cached=counts[1], decode=counts[2])
    one = rated(usage_event(tokens=tokens, stream=True, batch=batch))
    other = rated(usage_event(tokens=tokens, stream=False, batch=batch))
    assert one.cost == other.cost == cost(tokens, TINY, batch=batch)
    assert [(r.meter, r.tokens, r.cost) for r in one.records] == [(r.meter, r.tokens, r.cost) for r in other.records]


async def test_a_client_that_leaves_pays_for_what_was_done_until_the_stop(rig):
    """Aborted streams elsewhere cost nothing, or everything."""
    await rig.bill(usage_event(outcome=Outcome.CLIENT_LEFT, tokens=Tokens(prefill_computed=100, decode=7)))
    assert await charged(rig) == 100 * 100 + 7 * 400


@pytest.mark.parametrize("cause", ["worker_lost", "gateway_lost", "hand_off_failed"])
async def test_what_we_break_costs_nothing_and_keeps_its_counts(rig, cause):
    await rig.bill(usage_event(outcome=Outcome.INTERRUPTED, cause=cause))
    assert await charged(rig) == 0
    assert await rig.scalar("SELECT sum(tokens) FROM billing.usage_record") == 180


async def test_what_a_gateway_delivers_after_it_was_taken_for_dead_costs_nothing(rig):
    """It stood still for longer than its lease: its request was settled as a dead one's when it settles it, too."""
    finished = usage_event()
    await rig.redis.hset(keys.key_states("org_acme"), "key_1", "active:1")
    scripts = SettlementScripts(rig.redis)
    made = Reservation(
        rid=finished.rid, member=f"org_acme/{finished.rid}", now_ms=now_ms(), deadline_ms=now_ms() + 60_000,
        key_id="key_1", key_state="active:1", owner="{}", pool="tiny",
    )  # fmt: skip
    assert isinstance(await scripts.reserve("org_acme", made), Reserved)
    given_up = msgspec.structs.replace(
        finished, outcome=Outcome.INTERRUPTED, cause="gateway_dead", cost=Nano(0), settled_by="scheduler"
    )
    assert await scripts.settle(given_up, actual_usage(given_up))
    assert not await scripts.settle(finished, actual_usage(finished))
    await rig.consume(rig.consumer(), 1)
    assert await charged(rig) == 0
    assert await rig.scalar("SELECT sum(tokens) FROM billing.usage_record") == 180


async def test_an_empty_answer_costs_nothing(rig):
    await rig.bill(usage_event(cause=EMPTY_ANSWER, tokens=Tokens(prefill_computed=100, decode=1), cost=0))
    assert await charged(rig) == 0
    assert (await rig.one("SELECT outcome, billable FROM billing.request")).billable is False


async def test_an_answer_made_again_costs_nothing(rig):
    await rig.bill(usage_event(cause=REPEATED, batch=True, tokens=Tokens(prefill_computed=100, decode=5), cost=0))
    assert await charged(rig) == 0


async def test_a_refused_request_costs_nothing(rig):
    await rig.bill(usage_event(outcome=Outcome.REFUSED, cause="budget", tokens=Tokens()))
    assert await charged(rig) == 0


async def test_a_request_that_nobody_settled_costs_nothing(rig):
    rid, now = new_rid(now_ms()), now_ms()
    owner = Owner(
        org="org_acme", project="p", key_id="key_1", model="tiny", tier="default", price=TINY, slo=SloTarget()
    )  # fmt: skip
    await rig.redis.hset(keys.key_states("org_acme"), "key_1", "active:1")
    scripts = SettlementScripts(rig.redis)
    answer = await scripts.reserve(
        "org_acme",
        Reservation(
            rid=rid, member=f"org_acme/{rid}", now_ms=now, deadline_ms=now, key_id="key_1", key_state="active:1",
            owner=encode_owner(owner), pool="tiny",
        ),
    )  # fmt: skip
    assert isinstance(answer, Reserved)
    assert await Sweeper(rig.redis, scripts, now_ms=lambda: now + 121_000).sweep() == 1
    await rig.consume(rig.consumer(), 1)
    row = await rig.one("SELECT outcome, cost FROM billing.request")
    assert (row.outcome, row.cost) == ("lost", 0)


async def test_a_budget_set_while_a_request_runs_is_charged_when_it_ends(rig):
    """And by the next correction at the latest, should it end while the budget is being set."""
    rid, now = new_rid(now_ms()), now_ms()
    scripts, budgets, org = SettlementScripts(rig.redis), Budgets(rig.engine, rig.redis), "org_acme"
    await rig.redis.hset(keys.key_states(org), "key_1", "active:1")
    owner = Owner(
        org=org, project="proj_web", key_id="key_1", model="tiny", tier="default", price=TINY, slo=SloTarget()
    )  # fmt: skip
    asked = Reservation(
        rid=rid, member=f"{org}/{rid}", now_ms=now, deadline_ms=now + 60_000, key_id="key_1", key_state="active:1",
        owner=encode_owner(owner), pool="tiny",
    )  # fmt: skip
    assert isinstance(await scripts.reserve(org, asked), Reserved)
    async with rig.engine.begin() as conn:
        await set_budget(conn, Budget(organisation=org, scope="org", scope_id=org, amount=10 * COST))
    await budgets.sync(now=datetime.now(UTC), tenant=org)
    event = usage_event(rid=rid)
    assert await scripts.settle(event, {})
    assert await rig.redis.hget(keys.budget(org, "org", org), "spent") == str(COST).encode()
    await rig.consume(rig.consumer(), 1)
    assert await budgets.sync(now=datetime.now(UTC), tenant=org) == 0, "it was right already"


async def test_a_retry_is_paid_once_and_the_other_attempt_is_our_cost(rig):
    event = usage_event(attempts=2)
    await rig.bill(event)
    delivery = rig.attempt_consumer()
    await rig.emit_attempts(
        *attempt_records(event, reason="aborted", worker_ms=90.0, kv_byte_s=5e6), *attempt_records(event, attempt=2)
    )
    await rig.consume(delivery, 4)
    assert await charged(rig) == COST
    lost = await rig.rows("SELECT worker_ms, kv_byte_s FROM billing.attempt_cost WHERE attempt = 1")
    assert [(row.worker_ms, row.kv_byte_s) for row in lost] == [(90.0, 5e6)] * 2


async def test_the_prompt_of_several_samples_is_paid_once(rig):
    event = usage_event(tokens=Tokens(prefill_computed=100, prefill_cached=30, decode=50 + 50))
    await rig.bill(event)
    delivery = rig.attempt_consumer()
    half = [one for n in range(2) for one in attempt_records(usage_event(rid=event.rid), sample=n)]
    await rig.emit_attempts(*half)
    await rig.consume(delivery, 4)
    assert await charged(rig) == COST + 50 * 400
    assert await differences(rig) == {}


async def test_an_event_delivered_again_costs_nothing_more(rig):
    event = usage_event()
    await rig.bill(event, event)
    await rig.bill(event)
    assert await charged(rig) == COST


async def discounted(rig, ppm):
    async with rig.engine.begin() as conn:
        meters = {meter: TINY.of(meter) for meter in Meter}
        return (await set_price(conn, model="tiny", meters=meters, terms=Terms(batch_ppm=ppm))).price


async def test_a_batch_request_pays_the_discounted_price(rig):
    price: Price = await discounted(rig, 500_000)
    at = now_ms() + 1000
    await rig.bill(usage_event(price=price, batch=True, at_ms=at, cost=COST // 2), usage_event(price=price, at_ms=at))
    assert await charged(rig) == COST // 2 + COST


async def test_of_an_expired_batch_the_finished_lines_are_paid(rig):
    done = [usage_event(batch=True) for _ in range(3)]
    expired = [usage_event(batch=True, outcome=Outcome.REFUSED, cause="batch_expired", tokens=Tokens()) for _ in "12"]
    await rig.bill(*done, *expired)
    assert await charged(rig) == 3 * COST


async def differences(rig):
    today = datetime.now(UTC).date()
    async with rig.engine.connect() as conn:
        found = await reconcile(
            conn, from_day=today - timedelta(days=1), to_day=today, now_ms=now_ms() + 10**6, grace_s=0
        )
    return {one.request_id: one.kind for one in found.differences}


async def test_an_estimate_is_marked_and_listed_when_the_workers_counted_otherwise(rig):
    event = usage_event(estimated=True)
    await rig.bill(event)
    assert await rig.scalar("SELECT estimated FROM billing.request") is True
    assert await charged(rig) == COST
    await rig.emit_attempts(*attempt_records(event, prompt_tokens=131))
    await rig.consume(rig.attempt_consumer(), 2)
    assert await differences(rig) == {event.rid: Kind.WORKERS}


async def test_a_later_correction_is_an_adjustment(rig):
    """Elsewhere partial rows are priced zero, and stay so."""
    event = usage_event(estimated=True, tokens=Tokens(prefill_computed=130))
    await rig.bill(event)
    await rig.emit_attempts(*attempt_records(usage_event(rid=event.rid)))
    await rig.consume(rig.attempt_consumer(), 2)
    assert await differences(rig) == {event.rid: Kind.WORKERS}
    said = Wanted(
        id=uuid.uuid4(), request_id=uuid.UUID(event.rid), prefill_computed=100, prefill_cached=30, decode=50,
        reason="counts came late",
    )  # fmt: skip
    for _ in range(2):
        async with rig.engine.begin() as conn:
            await correct(conn, said, now=datetime.now(UTC))
    assert await charged(rig) == COST
    assert await rig.scalar("SELECT cost FROM billing.request") == 130 * 100, "what was posted stays"
    assert await rig.scalar("SELECT count(*) FROM billing.ledger_transaction WHERE kind = 'adjustment'") == 1
    assert await differences(rig) == {}


@pytest.mark.parametrize("path", list(ServingPath))
async def test_a_fallback_pays_the_price_of_the_model_that_was_asked_for(rig, path):
    await rig.bill(usage_event(path=path, pool="another", attempts=2))
    row = await rig.one("SELECT model, pool, path, cost FROM billing.request")
    assert tuple(row) == ("tiny", "another", path.value, COST)
