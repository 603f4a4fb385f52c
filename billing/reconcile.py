"""Does what we billed agree with the ledger, the price book, the answers and the workers? Per tenant and day.

Three independent figures of every request: the usage records (from the settlement), the ledger (from the
posting) and the workers' own counts (from their attempts streams). Every difference names its request.
"""

import enum
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import reconcile_queries as q
from billing.database import create_engine
from billing.moments import moment

ALERT_RATIO: Final = 0.001  # of billed tokens; for what a crash of a worker may leave unconfirmed
GRACE_S: Final = 300.0
_MOST_LISTED: Final = 10_000


class Kind(enum.StrEnum):
    """What differs."""

    RECORDS = "records"  # not three records, or not tokens x price
    PRICE = "price"  # rated at another price than the version it names
    LEDGER = "ledger"  # usage and ledger disagree, or a transaction does not balance
    ANSWERED = "answered"  # the client was told another cost
    WORKERS = "workers"  # the workers counted other tokens
    UNBILLED = "unbilled"  # a worker finished it, and no usage event came
    UNCONFIRMED = "unconfirmed"  # billed, and no worker's record came


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One request that differs; `organisation` is empty when only the workers know of it."""

    request_id: str
    organisation: str
    kind: Kind
    detail: str


class TenantDay(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one organisation and UTC day. Costs in nano-units."""

    organisation: str
    day: date
    requests: int
    tokens: int
    billed_tokens: int
    usage_cost: int
    ledger_cost: int
    rollup_tokens: int
    rollup_cost: int
    confirmed_tokens: int = 0  # of the billed ones: counted alike by the workers themselves

    @property
    def agrees(self) -> bool:
        """Whether records, rollup and ledger say the same."""
        return self.usage_cost == self.ledger_cost == self.rollup_cost and self.tokens == self.rollup_tokens


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `drift` is what `pdgate reconcile` exits 1 for; `unconfirmed_ratio` 0.0 to 1.0 of requests."""

    from_day: date
    to_day: date
    days: tuple[TenantDay, ...]
    differences: tuple[Difference, ...]
    num_differences: Mapping[Kind, int]
    unconfirmed_ratio: float
    drift: bool


_QUERIES: Final[Mapping[Kind, str]] = {
    Kind.RECORDS: q.RECORDS,
    Kind.PRICE: q.PRICES,
    Kind.LEDGER: q.LEDGER,
    Kind.ANSWERED: q.ANSWERED,
    Kind.WORKERS: q.WORKERS,
    Kind.UNBILLED: q.UNBILLED,
    Kind.UNCONFIRMED: q.UNCONFIRMED,
}


async def reconcile(
    conn: AsyncConnection,
    *,
    from_day: date,
    to_day: date,
    now_ms: int,
    organisation: str | None = None,
    grace_s: float = GRACE_S,
) -> Reconciliation:
    """Compare the UTC days from `from_day` to `to_day`, both inclusive, across tenants or for one.

    `grace_s`: how long workers' records and usage events may take; what is younger is not missed yet.
    Requests that no worker confirmed are drift only above ALERT_RATIO: a worker that was killed may not have
    written its last records. Every other difference is.
    """
    start = datetime(from_day.year, from_day.month, from_day.day, tzinfo=UTC)
    window: dict[str, datetime | str | None] = {
        "start": start,
        "end": datetime(to_day.year, to_day.month, to_day.day, tzinfo=UTC) + timedelta(days=1),
        "organisation": organisation,
    }
    before = moment(now_ms) - timedelta(seconds=grace_s)
    confirmed = {
        (row.organisation, row.day): int(row.tokens or 0)
        for row in await conn.execute(sa.text(q.CONFIRMED), {**window, "before": before})
    }
    days = tuple(
        TenantDay(
            organisation=row.organisation,
            day=row.day,
            **{name: int(getattr(row, name)) for name in TenantDay.__struct_fields__[2:-1]},
            confirmed_tokens=confirmed.get((row.organisation, row.day), 0),
        )
        for row in await conn.execute(sa.text(q.TOTALS), window)
    )
    found: list[Difference] = []
    counts: dict[Kind, int] = {}
    for kind, query in _QUERIES.items():
        parameters = {**window, "before": before} if ":before" in query else window
        rows = (await conn.execute(sa.text(query), parameters)).all()
        counts[kind] = len(rows)
        found += [
            Difference(
                request_id=str(row.request_id), organisation=row.organisation, kind=kind, detail=row.detail or ""
            )
            for row in rows
        ]
    requests = sum(day.requests for day in days)
    unconfirmed = counts[Kind.UNCONFIRMED] / requests if requests else 0.0
    certain = sum(count for kind, count in counts.items() if kind is not Kind.UNCONFIRMED)
    return Reconciliation(
        from_day=from_day,
        to_day=to_day,
        days=days,
        differences=tuple(found[:_MOST_LISTED]),
        num_differences=counts,
        unconfirmed_ratio=unconfirmed,
        drift=certain > 0 or unconfirmed > ALERT_RATIO or not all(day.agrees for day in days),
    )


async def drift_ratio(conn: AsyncConnection, day: date, *, now_ms: int) -> float:
    """Return the largest relative difference between two books of a tenant's UTC day, 0.0 to 1.0: for the gauge.

    Compared are usage records, rollup and ledger in money, records and rollup in tokens, and billed tokens with those
    that the workers counted alike, once their records are due.
    """
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    window = {"start": start, "end": start + timedelta(days=1), "organisation": None}
    before = moment(now_ms) - timedelta(seconds=GRACE_S)
    pairs: list[tuple[int, ...]] = []
    for row in await conn.execute(sa.text(q.TOTALS), window):
        pairs += [(row.usage_cost, row.ledger_cost, row.rollup_cost), (row.tokens, row.rollup_tokens)]
    for row in await conn.execute(sa.text(q.CONFIRMED), {**window, "before": before}):
        pairs.append((row.due or 0, row.due_tokens or 0))
    return max((float((max(pair) - min(pair)) / max(pair)) for pair in pairs if max(pair)), default=0.0)


async def reconcile_database(
    database_url: str,
    *,
    from_day: date,
    to_day: date,
    now_ms: int,
    organisation: str | None = None,
    grace_s: float = GRACE_S,
) -> Reconciliation:
    """Reconcile on a connection of its own, in one snapshot: for the command line."""
    engine = create_engine(database_url, pool_size=1)
    try:
        async with engine.connect() as conn:
            await conn.execution_options(isolation_level="REPEATABLE READ")
            return await reconcile(
                conn, from_day=from_day, to_day=to_day, now_ms=now_ms, organisation=organisation, grace_s=grace_s
            )
    finally:
        await engine.dispose()
