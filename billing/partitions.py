"""Daily partitions of the metering tables: made ahead, so that no insert ever has to make one.

A new partition is created on its own and then attached: that takes a lock which does not conflict with
inserts and reads, where `CREATE TABLE ... PARTITION OF` would wait for both and hold up all behind it.
"""

from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, timedelta
from typing import Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.tables import PARTITIONED

_LOCK: Final = 0x70646761_74650002  # advisory lock: one process makes partitions at a time
_TABLES: Final = tuple(table.name for table in PARTITIONED)

_DAYS = text(
    r"""
    SELECT parent.relname AS table, to_date(right(child.relname, 8), 'YYYYMMDD') AS day
    FROM pg_inherits
    JOIN pg_class parent ON parent.oid = inhparent
    JOIN pg_class child ON child.oid = inhrelid
    JOIN pg_namespace schema ON schema.oid = parent.relnamespace
    WHERE schema.nspname = 'billing' AND parent.relname IN :tables AND child.relname ~ '_\d{8}$'
    """
).bindparams(bindparam("tables", expanding=True))

_FIRST_OPEN = text(
    """
    SELECT min(date_trunc('month', used.hour, 'UTC'))::date
    FROM (SELECT DISTINCT organisation, date_trunc('month', hour, 'UTC') AS hour FROM billing.usage_hourly) AS used
    WHERE NOT EXISTS (
        SELECT FROM billing.invoice AS i
        WHERE i.organisation = used.organisation AND i.period_start = used.hour AND i.kind = 'invoice'
    )
    """
)


class Partitions:
    """Which days can be written. Makes the coming days' partitions when a day is asked for that it does not know."""

    def __init__(self, engine: AsyncEngine, *, days_ahead: int = 7) -> None:
        self._engine = engine
        self._days_ahead = days_ahead
        self._known: frozenset[date] = frozenset()

    async def writable(self, days: AbstractSet[date]) -> frozenset[date]:
        """Return those of `days` that have partitions."""
        if not days <= self._known:
            async with self._engine.begin() as conn:
                yesterday = datetime.now(UTC).date() - timedelta(days=1)
                await ensure_partitions(conn, yesterday, self._days_ahead + 2)
                self._known = await partition_days(conn)
        return self._known & days

    def forget(self) -> None:
        """Look again next time: a partition was dropped meanwhile."""
        self._known = frozenset()


async def partition_days(conn: AsyncConnection) -> frozenset[date]:
    """Return the UTC days for which every metering table has its partition."""
    by_table = await _days_by_table(conn)
    return frozenset.intersection(*(frozenset(days) for days in by_table.values()))


async def ensure_partitions(conn: AsyncConnection, from_day: date, days: int) -> int:
    """Make the missing partitions of `days` days from `from_day` (UTC); return how many there were."""
    await conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    by_table = await _days_by_table(conn)
    made = 0
    for offset in range(days):
        day = from_day + timedelta(days=offset)
        for table in _TABLES:
            if day not in by_table[table]:
                await _make(conn, table, day)
                made += 1
    return made


async def drop_partitions(conn: AsyncConnection, before: date) -> list[str]:
    """Drop the metering partitions of days before `before`; return their names. Rollup and ledger keep the sums.

    Days whose month has usage without an invoice stay: SLO credits and re-ratings read the requests.
    """
    await conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    open_since: date | None = await conn.scalar(_FIRST_OPEN)
    limit = before if open_since is None else min(before, open_since)
    dropped = []
    for table, days in (await _days_by_table(conn)).items():
        for day in sorted(day for day in days if day < limit):
            name = f"billing.{table}_{day:%Y%m%d}"
            await conn.execute(text(f"ALTER TABLE billing.{table} DETACH PARTITION {name}"))
            await conn.execute(text(f"DROP TABLE {name}"))
            dropped.append(name)
    return dropped


async def _make(conn: AsyncConnection, table: str, day: date) -> None:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    end = start + timedelta(days=1)
    name = f"billing.{table}_{day:%Y%m%d}"
    await conn.execute(text(f"CREATE TABLE {name} (LIKE billing.{table} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"))
    await conn.execute(
        text(
            f"ALTER TABLE billing.{table} ATTACH PARTITION {name}"
            f" FOR VALUES FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
        )
    )


async def _days_by_table(conn: AsyncConnection) -> dict[str, set[date]]:
    found: dict[str, set[date]] = {table: set() for table in _TABLES}
    for row in await conn.execute(_DAYS, {"tables": _TABLES}):
        found[row.table].add(row.day)
    return found
