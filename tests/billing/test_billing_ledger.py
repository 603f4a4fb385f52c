"""The ledger balances, whatever is posted, repeated or tried."""

import asyncio
import contextlib
import uuid
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from billing_rig import Rig, now_ms, usage_event
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from billing import invoices
from billing.corrections import CorrectionError, Wanted, correct
from billing.credits import CreditError, NewGrant, grant, owed, use_credits
from billing.database import create_engine
from billing.invoice_book import InvoiceError
from billing.ledger import balance
from billing.periods import month_of
from billing.prices import Terms, set_price
from billing.rerating import Rerating, rerate
from contracts.rating import Meter, Tokens
from contracts.resp import redis_client
from contracts.usage import Outcome

TOTALS = """
SELECT
    (SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry) AS everything,
    (SELECT count(*) FROM (
        SELECT FROM billing.ledger_entry GROUP BY transaction_id HAVING sum(amount) <> 0
    ) AS t) AS wrong,
    (SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry
        JOIN billing.ledger_transaction AS t ON t.id = transaction_id WHERE amount > 0 AND t.kind = 'usage') AS owed,
    (SELECT coalesce(sum(cost), 0) FROM billing.usage_record) AS cost,
    (SELECT coalesce(sum(tokens), 0) FROM billing.usage_record) AS tokens,
    (SELECT count(*) FROM billing.usage_record) AS records,
    (SELECT coalesce(sum(cost), 0) FROM billing.usage_hourly) AS rolled_cost,
    (SELECT coalesce(sum(tokens), 0) FROM billing.usage_hourly) AS rolled_tokens,
    (SELECT coalesce(sum(requests), 0) FROM billing.usage_hourly) AS rolled_records
"""


async def test_free_and_interrupted_requests_post_nothing(rig):
    await rig.bill(usage_event(tokens=Tokens()), usage_event(outcome=Outcome.INTERRUPTED, cause="worker_lost"))
    assert await rig.scalar("SELECT count(*) FROM billing.usage_record") == 6
    assert await rig.scalar("SELECT count(*) FROM billing.ledger_transaction") == 0


async def test_a_meter_without_tokens_has_a_record_and_no_entry(rig):
    await rig.bill(usage_event(tokens=Tokens(prefill_computed=10, decode=1)))
    assert await rig.scalar("SELECT count(*) FROM billing.usage_record") == 3
    assert await rig.scalar("SELECT count(*) FROM billing.ledger_entry") == 3


async def test_the_rollup_equals_the_records(rig):
    hour = 3_600_000
    noon = now_ms() // hour * hour - 1  # the last millisecond of the previous hour
    await rig.bill(
        *(
            usage_event(
                org=f"org_{n % 3}",
                key_id=f"key_{n % 2}",
                batch=n % 5 == 0,
                outcome=Outcome.INTERRUPTED if n % 4 == 0 else Outcome.FINISHED,
                at_ms=noon + n % 2,
                tokens=Tokens(prefill_computed=n, prefill_cached=2 * n, decode=3 * n),
            )
            for n in range(60)
        )
    )
    by_hand = """
        SELECT organisation, date_trunc('hour', at, 'UTC') AS hour, project, key_id, model, tier, batch, billable,
            meter, price_version, scope, sum(tokens) AS tokens, sum(cost) AS cost, count(*) AS requests
        FROM billing.usage_record GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
    """
    rolled = """
        SELECT organisation, hour, project, key_id, model, tier, batch, billable, meter, price_version, scope,
            tokens, cost, requests
        FROM billing.usage_hourly
    """
    assert await rig.rows(f"({by_hand}) EXCEPT ({rolled})") == []
    assert await rig.rows(f"({rolled}) EXCEPT ({by_hand})") == []
    assert await rig.scalar("SELECT count(DISTINCT hour) FROM billing.usage_hourly") == 2


async def test_the_database_refuses_entries_that_do_not_balance(rig):
    await rig.bill(usage_event())
    accounts = [row.id for row in await rig.rows("SELECT id FROM billing.account ORDER BY id LIMIT 2")]
    for amounts in ((5, -4), (5, None)):
        with pytest.raises(DBAPIError, match="sums to"):
            await post_by_hand(rig, accounts, amounts)
    with pytest.raises(DBAPIError, match="no account"):
        await post_by_hand(rig, [accounts[0], 2**30], (5, -5))
    assert await rig.scalar("SELECT sum(amount) FROM billing.ledger_entry") == 0


async def post_by_hand(rig, accounts, amounts):
    transaction = uuid.uuid4()
    async with rig.engine.begin() as conn:
        await conn.execute(
            text(
                "INSERT INTO billing.ledger_transaction (id, kind, organisation, at) VALUES (:id, 'test', 'o', now())"
            ),
            {"id": transaction},
        )
        pairs = ", ".join(
            f"(:id, {account}, {amount})" for account, amount in zip(accounts, amounts, strict=True) if amount
        )
        await conn.execute(text(f"INSERT INTO billing.ledger_entry VALUES {pairs}"), {"id": transaction})


@pytest.mark.parametrize("table", ["ledger_entry", "ledger_transaction", "account"])
async def test_nothing_in_the_ledger_can_be_changed_or_deleted(rig, table):
    await rig.bill(usage_event())
    column = {"ledger_entry": "amount = 1", "ledger_transaction": "kind = ''", "account": "code = ''"}[table]
    for statement in (f"UPDATE billing.{table} SET {column}", f"DELETE FROM billing.{table}"):
        with pytest.raises(DBAPIError, match="only appends"):
            async with rig.engine.begin() as conn:
                await conn.exec_driver_sql(statement)


DUE = "SELECT coalesce(sum(due_cents), 0)::bigint FROM billing.invoice WHERE organisation = :org AND kind = 'invoice'"
NUMBERS = "SELECT number FROM billing.invoice WHERE number IS NOT NULL ORDER BY number"
ORGS = ["org_a", "org_b"]
MONTH = month_of(datetime.now(UTC) + timedelta(minutes=1))


async def truncate(database_url):
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "TRUNCATE billing.price, billing.request, billing.usage_record, billing.usage_hourly, billing.credit_grant,"
        " billing.rerating_line, billing.correction, billing.slo_credit, billing.invoice, billing.invoice_number,"
        " billing.ledger_transaction, billing.ledger_entry CASCADE"
    )
    await connection.close()


def machine(database_url, redis_url):
    """Settling, delivering, delivering again and changing prices, in any order."""

    class Billing(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.runner = asyncio.Runner()
            self.events = []
            self.waiting = 0
            self.run(truncate(database_url))
            self.redis = redis_client(redis_url)
            self.engine = create_engine(database_url)
            self.rig = Rig(self.redis, self.engine)
            self.run(self.redis.flushall())

        def run(self, coroutine):
            return self.runner.run(coroutine)

        @initialize()
        def price(self):
            self.run(self.set_price(from_ms=0))

        async def set_price(self, nano=1_234_567, from_ms=None):
            async with self.engine.begin() as conn:
                await set_price(conn, model="tiny", meters=dict.fromkeys(Meter, nano), from_ms=from_ms)

        @rule(nano=st.integers(0, 10**12))
        def change_the_price(self, nano):
            self.run(self.set_price(nano))

        @rule(
            org=st.sampled_from(ORGS),
            outcome=st.sampled_from(list(Outcome)),
            tokens=st.tuples(*[st.integers(0, 10_000)] * 3),
        )
        def settle(self, org, outcome, tokens):
            counts = Tokens(prefill_computed=tokens[0], prefill_cached=tokens[1], decode=tokens[2])
            event = usage_event(org=org, outcome=outcome, tokens=counts, at_ms=now_ms())
            self.events.append(event)
            self.waiting += 1
            self.run(self.rig.emit(event))

        @rule(data=st.data())
        def deliver_again(self, data):
            if self.events:
                again = data.draw(st.lists(st.sampled_from(self.events), max_size=4))
                self.waiting += len(again)
                self.run(self.rig.emit(*again))

        @rule(batch_size=st.integers(1, 5))
        def bill(self, batch_size):
            if self.waiting:
                self.run(self.rig.consume(self.rig.consumer(batch_size=batch_size), self.waiting))
                self.waiting = 0

        @rule(nano=st.integers(0, 10**9), minimum=st.integers(0, 10**6), again=st.booleans())
        def re_rate(self, nano, minimum, again):
            """Everything posted so far at another price, maybe twice with the same id."""
            wanted = self.run(self.new_rating(nano, minimum))
            for _ in range(1 + again):
                self.run(self.begin(rerate, wanted, now=MONTH.end - timedelta(days=1)))

        @rule(data=st.data(), decode=st.integers(0, 10_000), cached=st.integers(0, 10_000), again=st.booleans())
        def correct(self, data, decode, cached, again):
            """Other counts for a request that may be billed, corrected or re-rated already, maybe twice."""
            if not self.events:
                return
            wanted = Wanted(
                id=uuid.uuid4(), request_id=uuid.UUID(data.draw(st.sampled_from(self.events)).rid),
                decode=decode, prefill_cached=cached, reason="property",
            )  # fmt: skip
            with contextlib.suppress(CorrectionError):  # not billed yet, or not billable
                for _ in range(1 + again):
                    self.run(self.begin(correct, wanted, now=MONTH.end - timedelta(days=1)))

        async def new_rating(self, nano, minimum):
            async with self.engine.begin() as conn:
                made = await set_price(
                    conn, model="tiny", meters=dict.fromkeys(Meter, nano), terms=Terms(minimum=minimum)
                )
            return Rerating(
                id=uuid.uuid4(), model="tiny", price_version=made.price.version, from_at=MONTH.start,
                to_at=MONTH.end, reason="property",
            )  # fmt: skip

        @rule(org=st.sampled_from(ORGS), amount=st.integers(1, 10**8), key=st.sampled_from("abc"), paid=st.booleans())
        def grant_credit(self, org, amount, key, paid):
            new = NewGrant(kind="paid" if paid else "promotional", amount=amount, idempotency=key)
            with contextlib.suppress(CreditError):  # the key was used for another grant
                self.run(self.begin(grant, org, new, at=MONTH.start))

        @rule(org=st.sampled_from(ORGS))
        def use_credit(self, org):
            self.run(self.begin(use_credits, org, now=MONTH.end - timedelta(hours=1)))

        @rule(org=st.sampled_from(ORGS), later=st.booleans(), issue=st.booleans())
        def close(self, org, later, issue):
            """The month or, with what came late, the next one; again and again."""
            period = month_of(MONTH.end) if later else MONTH
            now = period.end + timedelta(hours=3)
            with contextlib.suppress(InvoiceError):  # out of order
                made = self.run(self.begin(invoices.close_period, org, period, currency="EUR", now=now))
                if issue:
                    self.run(self.begin(invoices.issue, org, made.id, now=now))

        async def begin(self, call, *words, **names):
            async with self.engine.begin() as conn:
                return await call(conn, *words, **names)

        @invariant()
        def everything_agrees(self):
            self.run(self.compare())

        async def compare(self):
            """In one look: each look costs more than what it looks at, and there is one after every step."""
            async with self.engine.connect() as conn:
                for org in ORGS:
                    # What is owed and on no invoice is what came after the last one; the rest is due, to the nano-unit.
                    due = (await conn.execute(text(DUE), {"org": org})).scalar_one()
                    assert await balance(conn, f"receivable:{org}") == due * 10_000_000 + await owed(conn, org)
                numbers = (await conn.execute(text(NUMBERS))).scalars().all()
                seen = (await conn.execute(text(TOTALS))).one()
            series = {}  # one a year
            for number in numbers:
                series.setdefault(number[:-6], []).append(int(number[-6:]))
            assert all(there == list(range(1, len(there) + 1)) for there in series.values()), "no gaps"
            assert (seen.everything, seen.wrong) == (0, 0)
            assert seen.owed == seen.cost == seen.rolled_cost
            assert (seen.tokens, seen.records) == (seen.rolled_tokens, seen.rolled_records)
            if not self.waiting:
                assert seen.records == 3 * len(self.events)
                meters = [event.tokens for event in self.events]
                assert seen.tokens == sum(tokens.prompt + tokens.decode for tokens in meters)

        def teardown(self):
            self.run(self.redis.aclose())
            self.run(self.engine.dispose())
            self.runner.close()

    return Billing


def test_the_ledger_balances_under_any_order_of_settling_repeating_repricing_re_rating_crediting_and_closing(
    postgres_url, valkey_url
):
    run_state_machine_as_test(
        machine(postgres_url, valkey_url),
        settings=settings(
            max_examples=10,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            print_blob=True,  # shrinking would take minutes: the blob is enough to repeat it
        ),
    )
    asyncio.run(truncate(postgres_url))
