"""Months: of budgets in the tenant's own zone, of invoices in UTC."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec


class Period(msgspec.Struct, frozen=True, order=True):
    """A month. `start` inclusive, `end` exclusive, both UTC."""

    start: datetime
    end: datetime

    @property
    def name(self) -> str:
        """Return `2026-11`: right for months in UTC."""
        return f"{self.start:%Y-%m}"


def zone(name: str) -> ZoneInfo:
    """Return a time zone. Raises ValueError when there is no such zone."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{name!r} is no time zone: write Europe/Berlin or UTC") from None


def month_of(at: datetime, time_zone: str = "UTC") -> Period:
    """Return the month that contains `at`, from local midnight to local midnight, whatever the clocks do between.

    Raises:
        ValueError: no such zone.
    """
    local_zone = zone(time_zone)
    local = at.astimezone(local_zone)
    first = datetime(local.year, local.month, 1, tzinfo=local_zone)
    return Period(first.astimezone(UTC), _next(first).astimezone(UTC))


def month_after(period: Period, time_zone: str = "UTC") -> Period:
    """Return the month after."""
    return month_of(period.end, time_zone)


def month_before(at: datetime) -> Period:
    """Return the last UTC month that was over at a moment."""
    return month_of(month_of(at).start - timedelta(microseconds=1))


def month_named(name: str) -> Period:
    """Return the UTC month `2026-11`. Raises ValueError for anything else."""
    try:
        first = datetime.strptime(name, "%Y-%m").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError(f"{name!r} is no month: write YYYY-MM") from None
    return month_of(first)


def _next(first: datetime) -> datetime:
    """Return the first of the next month at local midnight; a midnight that the clocks skip counts as its successor."""
    years, month = divmod(first.month, 12)
    return first.replace(year=first.year + years, month=month + 1)
