"""Monthly budgets and hard caps: their limits in Redis, where requests reserve, and what was spent, kept right.

1. `budget` has one row per scope: organisation, project or key. A hard one refuses what does not fit (reserve.lua);
   every one tells at its thresholds (billing.alerts). A prepaid organisation has one more, its credit, without period.
2. `Budgets.sync` writes limit and period to each hash, and corrects `spent`. The truth is what is posted, plus what is
   in the usage stream and not posted. It is read between two looks at the hash: what the first look saw and the truth
   lacks was never settled; what the truth has and the second look lacks was lost with Redis' data.
3. A hash gets its limit last. Reserve.lua refuses requests that need a budget whose limit is not there (503), so that
   after a loss of Redis' data nothing is spent twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any, Final

import msgspec
import sqlalchemy as sa
import structlog
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import money_tables as m
from billing import tables as t
from billing.credits import funding
from billing.events import Decoded, Poison, decode_event
from billing.moments import moment, unix_ms
from billing.periods import Period, month_after, month_of
from contracts import keys
from contracts.identity import shard_of
from contracts.units import MAX_EXACT_NANO
from contracts.wire import FIELD, Change, encode

log: Final = structlog.get_logger()

THRESHOLDS: Final = (50, 80, 100)
CREDIT: Final = "credit"
_MOST_WAITING: Final = 20_000  # events; with more, spent is corrected later
_PAGE: Final = 1000
_CHANGES_KEPT: Final = 10_000


class BudgetError(ValueError):
    """A budget that may not be set; the message says what would be right."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Money that a scope may use in a month, nano-units. `scope`: org, project or key."""

    organisation: str
    scope: str
    scope_id: str
    amount: int
    hard: bool = True
    thresholds: tuple[int, ...] = THRESHOLDS  # percent of `amount`
    set_by: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one hash in Redis must say. `limit` None = it only counts."""

    organisation: str
    scope: str
    scope_id: str
    limit: int | None
    period: Period | None  # None: for ever
    time_zone: str = "UTC"

    @property
    def key(self) -> str:
        """Return the hash's name."""
        return keys.budget(self.organisation, self.scope, self.scope_id)

    def counts(self, one: Decoded) -> bool:
        """Return whether an event is charged to it in its period."""
        event = one.event
        whose = {"org": event.org, CREDIT: event.org, "project": event.project, "key": event.key_id}[self.scope]
        inside = self.period is None or self.period.start <= moment(one.at_ms) < self.period.end
        return event.org == self.organisation and whose == self.scope_id and inside


async def set_budget(conn: AsyncConnection, budget: Budget) -> None:
    """Set a scope's budget. Raises BudgetError when its terms make no sense."""
    if budget.scope not in ("org", "project", "key"):
        raise BudgetError(f"a budget is of an org, a project or a key, not of {budget.scope!r}")
    if not 0 <= budget.amount <= MAX_EXACT_NANO:
        raise BudgetError(f"a budget must be 0 to {MAX_EXACT_NANO} nano-units")
    if budget.scope == "org" and budget.scope_id != budget.organisation:
        raise BudgetError("the scope of an organisation's budget is the organisation")
    if any(not 0 < threshold <= 1000 for threshold in budget.thresholds):
        raise BudgetError("thresholds are percent, 1 to 1000")
    values = msgspec.structs.asdict(budget) | {"thresholds": sorted(set(budget.thresholds))}
    query = insert(m.budget).values(values)
    await conn.execute(query.on_conflict_do_update(constraint="pk_budget", set_={**values, "set_at": sa.func.now()}))


async def remove_budget(conn: AsyncConnection, tenant: str, scope: str, scope_id: str) -> bool:
    """Remove a scope's budget; return whether there was one. The caller syncs it, so that its limit goes too."""
    b = m.budget.c
    mine = (b.organisation == tenant) & (b.scope == scope) & (b.scope_id == scope_id)
    return (await conn.execute(sa.delete(m.budget).where(mine).returning(b.scope))).first() is not None


async def budgets_of(conn: AsyncConnection, tenant: str) -> Sequence[Budget]:
    """Return an organisation's budgets."""
    return await _budgets(conn, m.budget.c.organisation == tenant)


async def budgets_across_tenants(conn: AsyncConnection) -> Sequence[Budget]:
    """Return every budget."""
    return await _budgets(conn)


async def _budgets(conn: AsyncConnection, *where: sa.ColumnElement[bool]) -> list[Budget]:
    query = sa.select(m.budget).where(*where).order_by(m.budget.c.organisation, m.budget.c.scope, m.budget.c.scope_id)
    return [
        Budget(**{name: row[name] for name in Budget.__struct_fields__} | {"thresholds": tuple(row["thresholds"])})
        for row in (await conn.execute(query)).mappings()
    ]


async def spent_in(conn: AsyncConnection, tenant: str, *, scope: str, scope_id: str, period: Period | None) -> int:
    """Return what a scope was charged for usage in a period, nano-units; None = ever."""
    hourly, record = t.usage_hourly.c, t.usage_record.c

    def of(columns: Any) -> list[sa.ColumnElement[bool]]:
        where = [columns.organisation == tenant]
        if scope == "project":
            where.append(columns.project == scope_id)
        if scope == "key":
            where.append(columns.key_id == scope_id)
        return where

    total = sa.select(sa.func.coalesce(sa.func.sum(hourly.cost), 0)).where(*of(hourly))
    if period is None:
        return int((await conn.execute(total)).scalar_one())
    # Zones half an hour off: the rollup has whole hours of UTC, so both ends may cut one.
    first, last = _hour(period.start, up=True), _hour(period.end, up=False)
    spent = int((await conn.execute(total.where(hourly.hour >= first, hourly.hour < last))).scalar_one())
    for start, end in ((period.start, first), (last, period.end)):
        if start < end:
            part = sa.select(sa.func.coalesce(sa.func.sum(record.cost), 0)).where(
                *of(record), record.at >= start, record.at < end
            )
            spent += int((await conn.execute(part)).scalar_one())
    return spent


def _hour(at: datetime, *, up: bool) -> datetime:
    hour_ms = 3_600_000
    whole = unix_ms(at) // hour_ms * hour_ms
    return moment(whole + hour_ms if up and whole < unix_ms(at) else whole)


class Budgets:
    """Keeps the hashes right."""

    def __init__(self, engine: AsyncEngine, redis: Redis) -> None:
        self._engine = engine
        self._redis = redis
        self._script = redis.register_script((files("contracts") / "budget.lua").read_text())

    async def sync(self, *, now: datetime, tenant: str | None = None) -> int:
        """Bring every budget (or one organisation's) up to date; return how many nano-units `spent` was off."""
        async with self._engine.begin() as conn:
            held = await held_budgets(conn, now=now, tenant=tenant)
        by_shard: dict[int, list[Held]] = {}
        for one in held:
            by_shard.setdefault(shard_of(one.organisation), []).append(one)
        off = 0
        for shard, budgets in by_shard.items():
            off += await self._sync_shard(shard, budgets)
        return off

    async def drop(self, tenant: str, scope: str, scope_id: str) -> None:
        """Take a budget's limit away; what is reserved in it still comes back."""
        await self._redis.hdel(keys.budget(tenant, scope, scope_id), "limit")

    async def announce(self, tenant: str) -> None:
        """Tell every gateway that an organisation's budgets are others, so that it reads its keys again."""
        change = encode(Change(kind="budget", id=tenant, state=""))
        await self._redis.xadd(keys.CHANGES, {FIELD: change}, maxlen=_CHANGES_KEPT, approximate=True)

    async def _sync_shard(self, shard: int, budgets: Sequence[Held]) -> int:
        before = {one.key: await self._write(one, limit="keep", delta=0) for one in budgets}
        waiting = await self._waiting(shard)
        if waiting is None:
            log.warning("budgets_not_corrected", shard=shard, more_than=_MOST_WAITING)
            for one in budgets:
                await self._write(one, limit=_limit(one), delta=0)
            return 0
        truth = await self._truth(budgets, waiting)
        off = 0
        for one in budgets:
            right = truth[one.key]
            after = await self._write(one, limit="keep", delta=0)
            delta = max(0, right - after) or min(0, right - before[one.key])
            await self._write(one, limit=_limit(one), delta=delta)
            if delta:
                log.warning("budget_corrected", organisation=one.organisation, scope=one.scope, nano=delta)
            off += abs(delta)
        return off

    async def _write(self, one: Held, *, limit: str, delta: int) -> int:
        ends = next_ends = ""
        if one.period is not None:
            ends = str(unix_ms(one.period.end))
            next_ends = str(unix_ms(month_after(one.period, one.time_zone).end))
        answer: Any = await self._script(keys=[one.key], args=[limit, ends, next_ends, str(delta)])
        return int(answer[0])

    async def _waiting(self, shard: int) -> list[Decoded] | None:
        """Return the events of a shard's stream; None when there are too many to look at."""
        stream, start = keys.usage_stream(shard), "-"
        found: list[Decoded] = []
        while True:
            page: Any = await self._redis.xrange(stream, min=start, count=_PAGE)
            for _, fields in page:
                try:
                    found.append(decode_event(fields.get(FIELD.encode(), b"")))
                except Poison:
                    continue  # will be buried, so it was never charged
            if len(page) < _PAGE:
                return found
            if len(found) > _MOST_WAITING:
                return None
            last = page[-1][0]
            start = "(" + (last.decode() if isinstance(last, bytes) else last)

    async def _truth(self, budgets: Sequence[Held], waiting: Sequence[Decoded]) -> Mapping[str, int]:
        """Return what each budget was charged: posted, or on its way."""
        async with self._engine.connect() as conn:
            await conn.execution_options(isolation_level="REPEATABLE READ")
            posted = await _posted(conn, waiting)
            new = {one.request_id: one for one in waiting if one.request_id not in posted}.values()
            return {
                one.key: await spent_in(
                    conn, one.organisation, scope=one.scope, scope_id=one.scope_id, period=one.period
                )
                + sum(event.event.cost for event in new if one.counts(event))
                for one in budgets
            }


async def held_budgets(conn: AsyncConnection, *, now: datetime, tenant: str | None = None) -> Sequence[Held]:
    """Return what the hashes must say at `now`: hard budgets, and the credit of prepaid organisations."""
    zones, prepaid = await _profiles(conn)
    budgets = await (budgets_across_tenants(conn) if tenant is None else budgets_of(conn, tenant))
    held = [
        Held(
            organisation=one.organisation,
            scope=one.scope,
            scope_id=one.scope_id,
            limit=one.amount if one.hard else None,
            period=month_of(now, zones.get(one.organisation, "UTC")),
            time_zone=zones.get(one.organisation, "UTC"),
        )
        for one in budgets
    ]
    for organisation in prepaid if tenant is None else prepaid & {tenant}:
        limit = max(0, await funding(conn, organisation))
        held.append(Held(organisation=organisation, scope=CREDIT, scope_id=organisation, limit=limit, period=None))
    return held


async def _profiles(conn: AsyncConnection) -> tuple[Mapping[str, str], frozenset[str]]:
    rows = (await conn.execute(sa.select(m.profile.c.organisation, m.profile.c.time_zone, m.profile.c.prepaid))).all()
    return {row.organisation: row.time_zone for row in rows}, frozenset(row.organisation for row in rows if row.prepaid)


async def _posted(conn: AsyncConnection, waiting: Iterable[Decoded]) -> frozenset[object]:
    ids = [(one.request_id, moment(one.at_ms)) for one in waiting]
    if not ids:
        return frozenset()
    query = sa.select(t.request.c.request_id).where(
        t.request.c.request_id.in_([request_id for request_id, _ in ids]),
        t.request.c.at.between(min(at for _, at in ids), max(at for _, at in ids)),
    )
    return frozenset((await conn.execute(query)).scalars())


def _limit(one: Held) -> str:
    return "" if one.limit is None else str(min(one.limit, MAX_EXACT_NANO))
