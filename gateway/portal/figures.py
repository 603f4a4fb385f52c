"""Numbers as people read them, with their units. Pure; the filters of every template."""

import datetime as dt
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from gateway.schemas.answers import money_text

NOTHING: Final = "\u2013"
METERS: Final[Mapping[str, str]] = {
    "prefill_computed": "Prefill, computed",
    "prefill_cached": "Prefill, cached",
    "decode": "Decode",
    "minimum_charge": "Minimum charge",
}
PATHS: Final[Mapping[str, str]] = {
    "pd": "Prefill → decode",
    "unified": "Unified",
    "fallback": "Fallback",
    "local": "Local",
}
_RISKY: Final = ("=", "+", "-", "@", "\t", "\r")
_STEPS: Final = ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k"))


def count(number: float | None) -> str:
    """Return a whole number with thin separators."""
    return NOTHING if number is None else f"{number:,.0f}".replace(",", "\u202f")


def short(number: float | None) -> str:
    """Return a number with at most four digits: 12.3 k, 4.56 M."""
    if number is None:
        return NOTHING
    for step, letter in _STEPS:
        if abs(number) >= step:
            scale = 1000 if letter == "k" else step
            return (
                f"{number / scale:.3g}\u202f{letter}"
                if abs(number) / scale < 1000
                else f"{number / scale:.0f}\u202f{letter}"
            )
    return count(number)


def money(nano: int | None, currency: str) -> str:
    """Return nano-units as an amount with as many decimals as it needs to say something."""
    if nano is None:
        return NOTHING
    amount = Decimal(nano) / 1_000_000_000
    size = abs(amount)
    digits = 2 if size >= 1 or not amount else 4 if size >= Decimal("0.01") else 6 if size >= Decimal("0.0001") else 9
    return f"{amount:,.{digits}f}\u00a0{currency}".replace(",", "\u202f")


def exact(nano: int | None, currency: str) -> str:
    """Return nano-units to the last digit."""
    return NOTHING if nano is None else f"{money_text(nano)}\u00a0{currency}"


def cents(amount: int, currency: str) -> str:
    """Return hundredths of the currency as an amount."""
    return f"{Decimal(amount) / 100:,.2f}\u00a0{currency}".replace(",", "\u202f")


def ms(value: float | None) -> str:
    """Return milliseconds, as seconds from one second on."""
    if value is None:
        return NOTHING
    if value >= 1000:
        return f"{value / 1000:.2f}\u00a0s"
    return f"{value:.0f}\u00a0ms" if value >= 10 else f"{value:.1f}\u00a0ms"


def percent(share: float | None) -> str:
    """Return a share of 0 to 1."""
    return NOTHING if share is None else f"{share * 100:.1f}\u00a0%"


def change(now: float | None, before: float | None) -> str:
    """Return how a figure differs from the one before, in percent; empty when there is nothing to compare with."""
    if not before or now is None:
        return ""
    times = now / before
    return f"{(times - 1) * 100:+.0f}\u00a0%" if times < 10 else f"\u00d7\u202f{short(times)}"


def cell(text: str) -> str:
    """Return a cell of a CSV that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(_RISKY) else text


def iso(at: dt.datetime | float | None) -> str:
    """Return a moment (a datetime, or Unix seconds) for the `datetime` attribute of a `time` element."""
    if at is None:
        return ""
    moment = at if isinstance(at, dt.datetime) else dt.datetime.fromtimestamp(at, dt.UTC)
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(at: dt.datetime | float | None) -> str:
    """Return a moment in UTC, until the browser puts it into the reader's zone."""
    return NOTHING if at is None else iso(at)[:16].replace("T", " ") + " UTC"


def meter(name: str | None) -> str:
    """Return what a meter is called."""
    return METERS.get(name or "", name or NOTHING)


def path(name: str | None) -> str:
    """Return what a path is called."""
    return PATHS.get(name or "", name or "Not placed")


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "count": count, "short": short, "money": money, "exact": exact, "cents": cents, "ms": ms, "percent": percent,
    "change": change, "iso": iso, "utc": utc, "meter": meter, "path": path,
}  # fmt: skip
