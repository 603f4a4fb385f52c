"""What requests cost: as the endpoint says, or by a price per million tokens."""

from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec

from pdgate.bench.records import Record

_NANO: Final = 1_000_000_000


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Nano-units of a currency per million tokens."""

    computed: int
    cached: int
    output: int

    def nano(self, record: Record) -> int:
        """Return what a request costs, each meter rounded up."""
        cached = record.cached_tokens or 0
        prompt = record.prompt_tokens if record.prompt_tokens is not None else record.asked_prompt_tokens
        meters = ((prompt - cached, self.computed), (cached, self.cached), (record.output_tokens, self.output))
        return sum(-(-max(0, tokens) * price // 1_000_000) for tokens, price in meters)


def price_of(text: str) -> Price:
    """Return the price of "0.10,0.02,0.40": computed prompt, cached prompt, output, per million tokens.

    Raises:
        ValueError: not of that form.
    """
    try:
        computed, cached, output = (int(Decimal(part.strip()) * _NANO) for part in text.split(","))
    except (ValueError, InvalidOperation):
        raise ValueError(
            f"--price: {text!r} is not like 0.10,0.02,0.40 (computed, cached, output per million)"
        ) from None
    if min(computed, cached, output) < 0:
        raise ValueError("--price: a price is below zero")
    return Price(computed=computed, cached=cached, output=output)


def priced(records: list[Record], price: Price | None) -> tuple[list[Record], str]:
    """Return the records with their cost, and who said it: "endpoint", "--price" or nobody."""
    if any(record.cost_nano is not None for record in records):
        return records, "endpoint"
    if price is None:
        return records, ""
    return [
        record if record.error else msgspec.structs.replace(record, cost_nano=price.nano(record)) for record in records
    ], "--price"
