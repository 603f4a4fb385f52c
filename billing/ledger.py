"""The ledger: double entry, append only. Debit > 0, credit < 0, every transaction sums to zero.

A billable request that costs something posts one transaction: debit the organisation's receivable with the
whole, credit revenue of each meter with its part. Its id is the request's id, so it posts once. A request
that costs nothing posts nothing: there is no money to move, and its counts are in `usage_record`.
The database refuses what breaks the rules (migrations/versions/0002_billing.py).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import asyncpg

from billing.events import Rated
from contracts.rating import Meter

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
    FROM unnest($1::uuid[], $2::text[], $3::timestamptz[], $4::integer[], $5::bigint[], $6::bigint[], $7::bigint[])
        AS column_by_column (id, organisation, at, receivable, computed, cached, decode)
), posted AS (
    INSERT INTO billing.ledger_transaction (id, kind, organisation, at)
    SELECT id, 'usage', organisation, at FROM incoming
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO billing.ledger_entry (transaction_id, account_id, amount)
SELECT id, account_id, amount
FROM posted JOIN incoming USING (id)
CROSS JOIN LATERAL (
    VALUES (receivable, computed + cached + decode), ($8::integer, -computed), ($9::integer, -cached),
        ($10::integer, -decode)
) AS entry (account_id, amount)
WHERE amount <> 0
"""


def receivable(organisation: str) -> str:
    """Return the account of what an organisation owes."""
    return f"receivable:{organisation}"


def revenue(meter: Meter) -> str:
    """Return the account of what a meter earned."""
    return f"revenue:{meter}"


class Ledger:
    """Posts usage. Remembers the ids of accounts, which never change once committed."""

    def __init__(self) -> None:
        self._accounts: dict[str, int] = {}

    async def open_accounts(self, connection: asyncpg.Connection, organisations: Iterable[str]) -> None:
        """Make sure that the accounts exist. Not inside the posting transaction: what is remembered must be there."""
        wanted: dict[str, tuple[str, str | None, str | None]] = {
            receivable(org): ("receivable", org, None) for org in organisations
        }
        wanted |= {revenue(meter): ("revenue", None, meter.value) for meter in Meter}
        missing = sorted(wanted.keys() - self._accounts.keys())
        if not missing:
            return
        columns: tuple[Sequence[Any], ...] = tuple(zip(*(wanted[code] for code in missing), strict=True))
        await connection.execute(_OPEN, missing, *columns)
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
            )
            for one in costly
        ]
        await connection.execute(_POST, *zip(*rows, strict=True), *(self._accounts[revenue(meter)] for meter in Meter))
