"""How finely money can be asked for. Everywhere else amounts are nano-units, or cents: hundredths of the currency."""

from typing import Final

_WHOLE: Final = frozenset(
    "BIF CLP DJF GNF ISK JPY KMF KRW MGA PYG RWF UGX VND VUV XAF XOF XPF".split()  # noqa: SIM905 - ISO 4217
)


def cents_step(currency: str) -> int:
    """Return the smallest sum that can be paid, in cents: 100 where there is no coin below the unit."""
    return 100 if currency.upper() in _WHOLE else 1


def cents_text(cents: int, currency: str) -> str:
    """Return cents as people write them: `12.34`, and `1234` of a currency without cents."""
    whole, rest = divmod(abs(cents), 100)
    sign = "-" if cents < 0 else ""
    return f"{sign}{whole}" if cents_step(currency) == 100 and not rest else f"{sign}{whole}.{rest:02d}"
