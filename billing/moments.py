"""Unix milliseconds, as in request ids, to and from the timestamps of Postgres; exact."""

from datetime import UTC, datetime, timedelta
from typing import Final

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


def moment(unix_ms: int) -> datetime:
    """Return the UTC time of `unix_ms`. Raises OverflowError after the year 9999."""
    return EPOCH + timedelta(milliseconds=unix_ms)


def unix_ms(at: datetime) -> int:
    """Return whole milliseconds since 1970, rounded down."""
    return (at - EPOCH) // _MS
