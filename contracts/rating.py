"""What one request costs: the same sum in the gateway's answer and in billing's ledger."""

import enum
from typing import Final

import msgspec

from contracts.units import Nano, NanoPerMillion

PPM: Final = 1_000_000
MINIMUM_CHARGE: Final = "minimum_charge"
"""The fourth record of a request that its tokens alone would make cheaper than the minimum."""


class CacheScope(enum.StrEnum):
    """Whose prefixes a request's cached tokens were found among."""

    OWN = "own"
    SHARED = "shared"  # a share group's, by consent of its organisations


class Meter(enum.StrEnum):
    """What is metered per request. Computed + cached = prompt tokens, each priced once."""

    PREFILL_COMPUTED = "prefill_computed"
    PREFILL_CACHED = "prefill_cached"
    DECODE = "decode"


class Price(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of a model's prices, nano-units per million tokens of each meter.

    `tier`: the one it is for, None = all. `prefill_shared`: of hits on a share group's prefixes, None = as
    `prefill_cached`. `batch_ppm`: what a batch request pays, in millionths of the price. `minimum`: the least that a
    billable request with any tokens costs, nano-units.
    """

    version: int
    model: str
    prefill_computed: NanoPerMillion
    prefill_cached: NanoPerMillion
    decode: NanoPerMillion
    tier: str | None = None
    prefill_shared: NanoPerMillion | None = None
    batch_ppm: int = PPM
    minimum: Nano = Nano(0)

    def of(self, meter: Meter, *, batch: bool = False, scope: CacheScope = CacheScope.OWN) -> NanoPerMillion:
        """Return the price of `meter` for such a request, rounded up."""
        match meter:
            case Meter.PREFILL_COMPUTED:
                price = self.prefill_computed
            case Meter.PREFILL_CACHED:
                shared = self.prefill_shared if scope is CacheScope.SHARED else None
                price = self.prefill_cached if shared is None else shared
            case Meter.DECODE:
                price = self.decode
        return NanoPerMillion(-(-price * self.batch_ppm // PPM)) if batch and self.batch_ppm != PPM else price


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


def cost(tokens: Tokens, price: Price, *, batch: bool = False, scope: CacheScope = CacheScope.OWN) -> Nano:
    """Return the cost of a billable request: its three records, each rated alone, or the minimum if that is more."""
    total = sum(rate(tokens.of(meter), price.of(meter, batch=batch, scope=scope)) for meter in Meter)
    return Nano(total + top_up(tokens, price, total))


def top_up(tokens: Tokens, price: Price, total: int) -> Nano:
    """Return what the minimum charge adds to records that cost `total`; nothing to a request without tokens."""
    used = tokens.prefill_computed or tokens.prefill_cached or tokens.decode
    return Nano(max(0, price.minimum - total)) if used else Nano(0)
