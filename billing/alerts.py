"""Tells organisations how far their budgets are used: once per threshold and month, by a signed webhook."""

from datetime import datetime
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing.budgets import Budget, budgets_across_tenants, spent_in
from billing.periods import Period, month_of
from billing.profiles import find_profile
from billing.webhooks import enqueue

EVENT: Final = "budget.threshold_reached"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a webhook. Money in nano-units; `threshold` in percent of `amount`."""

    organisation: str
    scope: str
    scope_id: str
    threshold: int
    spent_nano: int
    amount_nano: int
    hard: bool
    period_start: str
    period_end: str


async def raise_alerts(conn: AsyncConnection, *, now: datetime) -> list[Alert]:
    """Note every threshold that was reached and not told yet, and queue its webhook in the same transaction."""
    raised: list[Alert] = []
    for budget in await budgets_across_tenants(conn):
        profile = await find_profile(conn, budget.organisation)
        period = month_of(now, profile.time_zone)
        spent = await spent_in(conn, budget.organisation, scope=budget.scope, scope_id=budget.scope_id, period=period)
        for threshold in budget.thresholds:
            if spent * 100 < budget.amount * threshold or not await _note(conn, budget, period, threshold, spent):
                continue
            alert = Alert(
                organisation=budget.organisation,
                scope=budget.scope,
                scope_id=budget.scope_id,
                threshold=threshold,
                spent_nano=spent,
                amount_nano=budget.amount,
                hard=budget.hard,
                period_start=period.start.isoformat(),
                period_end=period.end.isoformat(),
            )
            if profile.webhook_url:
                await enqueue(conn, budget.organisation, url=profile.webhook_url, event=EVENT, data=alert)
            raised.append(alert)
    return raised


async def _note(conn: AsyncConnection, budget: Budget, period: Period, threshold: int, spent: int) -> bool:
    query = (
        insert(m.budget_alert)
        .values(
            organisation=budget.organisation,
            scope=budget.scope,
            scope_id=budget.scope_id,
            period_start=period.start,
            threshold=threshold,
            spent=spent,
            amount=budget.amount,
        )
        .on_conflict_do_nothing()
        .returning(sa.literal(1))
    )
    return (await conn.execute(query)).first() is not None
