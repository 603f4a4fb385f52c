"""What one request costs: the same sum in the gateway's answer and in billing's ledger."""

import enum

import msgspec

from contracts.units import Nano, NanoPerMillion


class Meter(enum.StrEnum):
    """What is metered per request. Computed + cached = prompt tokens, each priced once."""

    PREFILL_COMPUTED = "prefill_computed"
    PREFILL_CACHED = "prefill_cached"
    DECODE = "decode"


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model's prices, nano-units per million tokens of each meter."""

    version: int
    model: str
    prefill_computed: NanoPerMillion
    prefill_cached: NanoPerMillion
    decode: NanoPerMillion

    def of(self, meter: Meter) -> NanoPerMillion:
        """Return the price of `meter`."""
        match meter:
            case Meter.PREFILL_COMPUTED:
                return self.prefill_computed
            case Meter.PREFILL_CACHED:
                return self.prefill_cached
            case Meter.DECODE:
                return self.decode


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The three meters of one request, in tokens."""

    prefill_computed: int = 0
    prefill_cached: int = 0
    decode: int = 0

    @property
    def prompt(self) -> int:
        """Prompt tokens: computed plus cached."""
        return self.prefill_computed + self.prefill_cached

    def of(self, meter: Meter) -> int:
        """Return the tokens of `meter`."""
        match meter:
            case Meter.PREFILL_COMPUTED:
                return self.prefill_computed
            case Meter.PREFILL_CACHED:
                return self.prefill_cached
            case Meter.DECODE:
                return self.decode


def rate(tokens: int, price: NanoPerMillion) -> Nano:
    """Return the cost of one usage record (one meter of one request), rounded up once.

    Raises:
        ValueError: a negative count or price.
    """
    if tokens < 0 or price < 0:
        raise ValueError(f"cannot rate {tokens} tokens at {price} nano-units per million")
    return Nano(-(-tokens * price // 1_000_000))


def cost(tokens: Tokens, price: Price) -> Nano:
    """Return the cost of a request: the sum of its three records, each rated alone."""
    return Nano(sum(rate(tokens.of(meter), price.of(meter)) for meter in Meter))
