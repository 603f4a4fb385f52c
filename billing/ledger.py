"""The ledger: double entry, append only. Debit > 0, credit < 0, every transaction sums to zero.

A billable request that costs something posts one transaction: debit the organisation's receivable with the
whole, credit revenue of each meter with its part. Its id is the request's id, so it posts once. A request
that costs nothing posts nothing: there is no money to move, and its counts are in `usage_record`.
Everything else is posted by `post_transaction`, whose ids are derived from what they are about, so it posts once too.
The database refuses what breaks the rules (migrations/versions/0002_billing.py).
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import asyncpg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import tables as t
from billing.accounts import METERS, Account, Posting, account, receivable, revenue
from billing.events import Rated

_OPEN: Final = """
INSERT INTO billing.account (code, kind, organisation, meter)
SELECT code, kind, organisation, meter::billing.meter
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS new (code, kind, organisation, meter)
ON CONFLICT DO NOTHING
"""
_FIND: Final = "SELECT code, id FROM billing.account WHERE code = ANY ($1::text[])"
_POST: Final = """
WITH incoming AS MATERIALIZED (
    SELECT *
    FROM unnest($1::uuid[], $2::text[], $3::timestamptz[], $4::integer[], $5::bigint[], $6::bigint[], $7::bigint[],
        $8::bigint[]) AS column_by_column (id, organisation, at, receivable, computed, cached, decode, minimum)
), posted AS (
    INSERT INTO billing.ledger_transaction (id, kind, organisation, at)
    SELECT id, 'usage', organisation, at FROM incoming
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO billing.ledger_entry (transaction_id, account_id, amount)
SELECT id, account_id, amount
FROM posted JOIN incoming USING (id)
CROSS JOIN LATERAL (
    VALUES (receivable, computed + cached + decode + minimum), ($9::integer, -computed), ($10::integer, -cached),
        ($11::integer, -decode), ($12::integer, -minimum)
) AS entry (account_id, amount)
WHERE amount <> 0
"""

NOT_USAGE: Final = t.ledger_transaction.c.kind != sa.literal_column("'usage'")
"""What the partial index ix_ledger_transaction_organisation_at covers; a bound parameter would hide it."""


class Ledger:
    """Posts usage. Remembers the ids of accounts, which never change once committed."""

    def __init__(self) -> None:
        self._accounts: dict[str, int] = {}

    async def open_accounts(self, connection: asyncpg.Connection, organisations: Iterable[str]) -> None:
        """Make sure that the accounts exist. Not inside the posting transaction: what is remembered must be there."""
        wanted = {receivable(org) for org in organisations} | {revenue(meter) for meter in METERS}
        missing = sorted(wanted - self._accounts.keys())
        if not missing:
            return
        accounts = [account(code) for code in missing]
        columns: tuple[Sequence[Any], ...] = tuple(
            [getattr(one, name) for one in accounts] for name in Account.__struct_fields__
        )
        await connection.execute(_OPEN, *columns)
        self._accounts |= {row["code"]: row["id"] for row in await connection.fetch(_FIND, missing)}

    async def post_usage(self, connection: asyncpg.Connection, requests: Sequence[Rated]) -> None:
        """Post the requests that cost something and are not posted yet. The caller's transaction commits."""
        costly = [one for one in requests if one.cost > 0]
        if not costly:
            return
        rows = [
            (
                one.request_id,
                one.event.org,
                one.at,
                self._accounts[receivable(one.event.org)],
                *(record.cost for record in one.records),
                one.top_up,
            )
            for one in costly
        ]
        await connection.execute(_POST, *zip(*rows, strict=True), *(self._accounts[revenue(meter)] for meter in METERS))


async def post_transaction(
    conn: AsyncConnection,
    *,
    transaction_id: uuid.UUID,
    kind: Posting,
    organisation: str,
    at: datetime,
    entries: Mapping[str, int],
    corrects: uuid.UUID | None = None,
    paid: bool = True,
) -> bool:
    """Post a transaction that is not usage; return False when its id is posted already. The caller commits.

    Args:
        conn: in a transaction.
        transaction_id: derived from what it is about, so that doing it again posts nothing.
        kind: why.
        organisation: whose.
        at: decides the period.
        entries: nano-units by account code; they sum to zero, zeros are left out.
        corrects: the transaction that this one corrects.
        paid: for a new credit account, whether it was paid for.

    Raises:
        ValueError: the entries do not sum to zero.
    """
    if sum(entries.values()):
        raise ValueError(f"{kind} of {organisation} does not balance: {dict(entries)}")
    amounts = {code: amount for code, amount in entries.items() if amount}
    if not amounts:
        return False
    accounts = [account(code, organisation=organisation, paid=paid) for code in sorted(amounts)]
    await conn.execute(
        insert(t.account)
        .values([{name: getattr(one, name) for name in Account.__struct_fields__} for one in accounts])
        .on_conflict_do_nothing()
    )
    added = await conn.execute(
        insert(t.ledger_transaction)
        .values(id=transaction_id, kind=kind.value, organisation=organisation, at=at, corrects=corrects)
        .on_conflict_do_nothing()
        .returning(t.ledger_transaction.c.id)
    )
    if added.first() is None:
        return False
    found = await conn.execute(sa.select(t.account.c.code, t.account.c.id).where(t.account.c.code.in_(amounts)))
    await conn.execute(
        t.ledger_entry.insert().values(
            [
                {"transaction_id": transaction_id, "account_id": row.id, "amount": amounts[row.code]}
                for row in found.all()
            ]
        )
    )
    return True


async def balance(conn: AsyncConnection, code: str) -> int:
    """Return the balance of an account that has few entries, nano-units; 0 when it does not exist."""
    entry = t.ledger_entry.c
    query = (
        sa.select(sa.func.coalesce(sa.func.sum(entry.amount), 0))
        .select_from(t.ledger_entry.join(t.account, t.account.c.id == entry.account_id))
        .where(t.account.c.code == code)
    )
    return int((await conn.execute(query)).scalar_one())
