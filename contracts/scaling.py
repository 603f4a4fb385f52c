"""How many workers a pool may have, and what the scheduler says of a pool that comes and goes. Values only.

```toml
[models.smollm2.scaling]               # without it a pool keeps the workers it was started with
max_workers = 4                        # of all roles together
to_zero = true                         # without traffic for idle_s nobody is left; default: true
idle_s = 300
sleep_s = 0                            # workers that can sleep do so for this long after idle_s, before they go
min_prefill = 1                        # floors while the pool is awake; default: whatever is cheapest
min_decode = 1
min_unified = 0
price_per_hour = "2.50"                # of one worker, currency units, where the fleet knows no prices
budget_per_hour = "10.00"              # most that the pool's workers may cost; default: no limit
spot_share = 0.0                       # share (0 to 1) of the workers above the floors that may be on spot capacity
zones = ["a", "b"]                     # default: none
residence_s = 120                      # least time that a worker serves before another model may have its room
```
"""

from decimal import Decimal, InvalidOperation
from typing import Annotated

import msgspec

from contracts.units import Nano

NANO_PER_UNIT = 1_000_000_000

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ScalingError(ValueError):
    """The scaling of a pool contradicts itself; the message names the field."""


class Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one pool's workers."""

    max_workers: Annotated[int, msgspec.Meta(ge=1)]
    to_zero: bool = True
    idle_s: Seconds = 300.0
    """Without an arrival and without work for so long, a pool `to_zero` gives all its workers back."""
    sleep_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """After `idle_s`, workers that can sleep do so for this long before they are given back. 0 = they are at once."""
    min_prefill: NotNegative = 0
    min_decode: NotNegative = 0
    min_unified: NotNegative = 0
    price_per_hour: str = "0"
    budget_per_hour: str = ""
    spot_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    zones: tuple[str, ...] = ()
    residence_s: Annotated[float, msgspec.Meta(ge=0)] = 120.0
    """Where models share machines: for how long workers serve, at least, before another model may have their room."""

    @property
    def price_nano(self) -> Nano:
        """Price of a worker and hour."""
        return Nano(_nano("price_per_hour", self.price_per_hour))

    @property
    def budget_nano(self) -> Nano | None:
        """Most that all workers may cost per hour; None = no limit."""
        return Nano(_nano("budget_per_hour", self.budget_per_hour)) if self.budget_per_hour else None

    def check(self) -> None:
        """Raise ScalingError where the fields contradict each other or an amount is none."""
        floors = self.min_prefill + self.min_decode + self.min_unified
        if floors > self.max_workers:
            raise ScalingError(f"max_workers = {self.max_workers} is less than the floors together, {floors}")
        if bool(self.min_prefill) != bool(self.min_decode):
            raise ScalingError("min_prefill and min_decode go together: one side alone serves nobody")
        budget = self.budget_nano
        if budget is not None and budget < self.price_nano * max(1, floors):
            raise ScalingError(f"budget_per_hour = {self.budget_per_hour!r} does not pay for the floors")


def _nano(field: str, text: str) -> int:
    try:
        amount = Decimal(text) * NANO_PER_UNIT
    except InvalidOperation:
        raise ScalingError(f"{field} = {text!r} is not a decimal number") from None
    if not amount.is_finite() or amount < 0 or amount != amount.to_integral_value():
        raise ScalingError(f"{field} = {text!r} must be >= 0 with at most 9 decimals")
    return int(amount)


class ScaleNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool's leader says of its workers each second. Kept in Redis for ten seconds: older is no news."""

    at_unix_ms: int
    mode: str
    """`auto`, or `shadow`: then nobody starts workers, and a pool without any stays so."""
    prefill: int
    """Workers wanted, by role."""
    decode: int
    unified: int
    why: str
    """Of the last step, or why there is none."""
    cold_s: float | None = None
    """Seconds from `at_unix_ms` until a pool that serves nobody is expected to; None = it serves."""
    simulated: bool = False
    """Its workers run the timed engine."""
    blocked: str = ""
    """Why workers cannot be had, where that is so."""

    keeps_rps: float = 0.0
    """The pool's hold on room that it shares with others (scheduler.policy.packing.Stake)."""
    gains_rps: float = 0.0
    wants: int = 0
    spare: int = 0
    giving: int = 0
    resident_s: float = 0.0

    @property
    def wakes(self) -> bool:
        """Whether a request that finds no worker may wait for one."""
        return self.mode == "auto" and self.cold_s is not None and not self.blocked


def encode_note(note: ScaleNote) -> bytes:
    """Return the form kept in Redis."""
    return msgspec.msgpack.encode(note)


def decode_note(raw: bytes) -> ScaleNote:
    """Return what is kept in Redis. Raises msgspec.MsgspecError on garbage."""
    return msgspec.msgpack.decode(raw, type=ScaleNote)
