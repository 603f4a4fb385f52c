"""Corrections of single requests: adjustments with an audit trail, in any order with re-ratings."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from billing_rig import TINY, now_ms, usage_event
from sqlalchemy.exc import DBAPIError

from billing import invoices
from billing.corrections import CorrectionError, Wanted, correct
from billing.ledger import balance
from billing.periods import month_of
from billing.prices import Terms, set_price
from billing.rerating import Rerating, rerate
from contracts.rating import CacheScope, Meter, Tokens, cost
from contracts.usage import Outcome

ORG = "org_acme"
COST = 30_600  # of the rig's event: 100 x 100 + 30 x 20 + 50 x 400 nano-units


async def begin(rig, call, *words, **names):
    async with rig.engine.begin() as conn:
        return await call(conn, *words, **names)


def of(event, **counts):
    return Wanted(id=uuid.uuid4(), request_id=uuid.UUID(event.rid), reason="recount", made_by="ann", **counts)


async def corrected(rig, wanted):
    return await begin(rig, correct, wanted, now=datetime.now(UTC))


async def owes(rig):
    return await begin(rig, balance, f"receivable:{ORG}")


async def test_a_correction_posts_the_difference_names_the_request_and_keeps_who_and_why(rig):
    event = usage_event()
    await rig.bill(event)
    done = await corrected(rig, of(event, decode=57))
    assert (done.changed, done.old.decode, done.new.decode) == (True, 50, 57)
    assert (done.old_cost, done.new_cost) == (COST, COST + 7 * 400)
    assert await owes(rig) == COST + 7 * 400
    assert await begin(rig, balance, "adjustment:decode") == -7 * 400
    row = await rig.one("SELECT * FROM billing.correction")
    assert (row.old_decode, row.decode, row.delta, row.reason, row.made_by) == (50, 57, 2800, "recount", "ann")
    posted = await rig.one("SELECT * FROM billing.ledger_transaction WHERE kind = 'adjustment'")
    assert str(posted.corrects) == event.rid
    assert await rig.scalar("SELECT tokens FROM billing.usage_record WHERE meter = 'decode'") == 50, "never an update"
    for statement in ("UPDATE billing.correction SET decode = 0", "DELETE FROM billing.correction"):
        with pytest.raises(DBAPIError, match="only appends"):
            async with rig.engine.begin() as conn:
                await conn.exec_driver_sql(statement)


async def test_the_same_counts_again_change_nothing_whatever_the_key(rig):
    event = usage_event()
    await rig.bill(event)
    first = of(event, decode=57)
    assert (await corrected(rig, first)).changed
    assert not (await corrected(rig, first)).changed
    assert not (await corrected(rig, of(event, decode=57))).changed
    assert (await corrected(rig, of(event, decode=50))).changed, "back to what was billed"
    assert not (await corrected(rig, first)).changed, "its key was used"
    assert await owes(rig) == COST
    assert await rig.scalar("SELECT count(*) FROM billing.correction") == 2


async def test_tokens_move_between_meters_each_at_its_price(rig):
    """Cached tokens that were billed as computed: the prompt stays, its price falls."""
    event = usage_event()
    await rig.bill(event)
    await corrected(rig, of(event, prefill_computed=10, prefill_cached=120))
    assert await owes(rig) == COST - 90 * 100 + 90 * 20


@pytest.mark.parametrize("correct_first", [True, False])
async def test_a_correction_and_a_re_rating_give_the_same_in_either_order(rig, correct_first):
    event = usage_event(batch=True, cache_scope=CacheScope.SHARED)
    await rig.bill(event)
    terms = Terms(batch_ppm=500_000, prefill_shared=50_000_000, minimum=9_000)
    dearer = {meter: 2 * TINY.of(meter) for meter in Meter}
    version = await begin(rig, set_price, model="tiny", meters=dearer, terms=terms)
    month = month_of(datetime.now(UTC) - timedelta(seconds=1))
    rating = Rerating(
        id=uuid.uuid4(), model="tiny", price_version=version.price.version, from_at=month.start, to_at=month.end,
        reason="agreed",
    )  # fmt: skip

    async def re_rate():
        await begin(rig, rerate, rating, now=datetime.now(UTC))

    wanted = of(event, prefill_cached=31, decode=3)
    if correct_first:
        await corrected(rig, wanted)
        await re_rate()
    else:
        await re_rate()
        await corrected(rig, wanted)
    right = Tokens(prefill_computed=100, prefill_cached=31, decode=3)
    assert await owes(rig) == cost(right, version.price, batch=True, scope=CacheScope.SHARED)


async def test_to_nothing_and_back_with_a_minimum_charge(rig):
    version = await begin(rig, set_price, model="tiny", meters=dict.fromkeys(Meter, 1), terms=Terms(minimum=500))
    event = usage_event(at_ms=now_ms() + 1000, price=version.price, cost=500)
    await rig.bill(event)
    assert await owes(rig) == 500
    await corrected(rig, of(event, prefill_computed=0, prefill_cached=0, decode=0))
    assert await owes(rig) == 0
    await corrected(rig, of(event, decode=1))
    assert await owes(rig) == 500


async def test_what_makes_no_sense_is_refused(rig):
    ours = usage_event(outcome=Outcome.INTERRUPTED, cause="worker_lost")
    fine = usage_event()
    await rig.bill(ours, fine)
    key = of(fine, decode=1)
    await corrected(rig, key)
    other = usage_event()
    await rig.bill(other)
    for wanted, words in (
        (of(ours, decode=1), "costs nothing whatever"),
        (of(usage_event(), decode=1), "no billed request"),
        (of(fine, decode=-1), "counts are 0 to"),
        (of(fine, decode=10**12), "counts are 0 to"),
        (Wanted(id=key.id, request_id=uuid.UUID(other.rid), decode=1, reason="x"), "of another request"),
        (Wanted(id=uuid.uuid4(), request_id=uuid.UUID(fine.rid), decode=2, reason=" "), "needs a reason"),
    ):
        with pytest.raises(CorrectionError, match=words):
            await corrected(rig, wanted)


async def test_a_correction_is_a_line_of_the_next_invoice(rig):
    event = usage_event(tokens=Tokens(decode=1_000_000))  # 0.40
    await rig.bill(event)
    month = month_of(datetime.now(UTC) - timedelta(seconds=1))
    await begin(rig, correct, of(event, decode=500_000), now=month.end - timedelta(seconds=1))
    made = await begin(rig, invoices.close_period, ORG, month, currency="EUR", now=month.end + timedelta(hours=3))
    assert [(line.kind, line.amount_cents, line.description) for line in made.lines if line.amount] == [
        ("usage", 40, "tiny: decode"),
        ("adjustment", -20, f"Corrected {event.rid}: recount"),
    ]
    assert made.due_cents == 20
