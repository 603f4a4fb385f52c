"""Five models' day of benches.autoscale: what their requests are, and how many arrive when.

Three kinds of traffic; each model has its peak at another hour, and arrivals swing tenfold between the quietest and
the busiest moment.
"""

import math
import random
from collections.abc import Iterator

import msgspec

from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.slo import SloTarget
from scheduler.policy.queueing import Fleet, Split
from scheduler.simulator.arrivals import Arrival, Lengths, Workload
from scheduler.simulator.setup import Setup

LATENCY = LatencyModel(
    prefill=PrefillCost(fixed_ms=20, per_token_ms=0.25, per_token_pair_ms=2e-6),
    decode=DecodeCost(fixed_ms=20, per_request_ms=0.2, per_kv_token_ms=2e-4),
    transfer=TransferCost(fixed_ms=2, bytes_per_ms=2e7, kv_bytes_per_token=327_680),
    kv_capacity_tokens=200_000,
)
"""About a 70B model on a worker of four GPUs."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of traffic and its targets."""

    prompt: Lengths
    output: Lengths
    target: SloTarget
    steady_rps: float

    def workload(self, rate_rps: float = 1.0) -> Workload:
        return Workload(prompt=self.prompt, output=self.output, rate_rps=rate_rps)

    @property
    def fleet(self) -> Fleet:
        return Fleet(latency=LATENCY, target=self.target)

    def setup(self, split: Split) -> Setup:
        return Setup(split=split, target=self.target, latency=LATENCY)


KINDS = {
    "documents": Kind(
        prompt=Lengths(median=3000, p90_over_median=2.5, highest=16_000),
        output=Lengths(median=250, p90_over_median=2.5, highest=2000),
        target=SloTarget(ttft_ms=4000, tpot_ms=60),
        steady_rps=2.0,
    ),
    "chat": Kind(
        prompt=Lengths(median=800, p90_over_median=3.0, highest=16_000),
        output=Lengths(median=350, p90_over_median=2.5, highest=2000),
        target=SloTarget(ttft_ms=2000, tpot_ms=50),
        steady_rps=4.0,
    ),
    "code": Kind(
        prompt=Lengths(median=2000, p90_over_median=2.0, highest=16_000),
        output=Lengths(median=700, p90_over_median=2.0, highest=3000),
        target=SloTarget(ttft_ms=3000, tpot_ms=60),
        steady_rps=2.5,
    ),
}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model's day."""

    name: str
    kind: str
    low_rps: float
    peak_hour: float
    """Of the 24."""
    swing: float = 10.0

    def rate_rps(self, share: float) -> float:
        """Return the rate at a share (0 to 1) of the day: one high and one low, with a shoulder before the high."""
        turn = 2 * math.pi * (share - self.peak_hour / 24)
        wave = 0.5 + 0.5 * math.cos(turn) + 0.12 * math.sin(2 * turn)
        low, high = -0.0067, 1.0068  # of the wave
        return self.low_rps * self.swing ** ((wave - low) / (high - low))


MODELS = (
    Model(name="documents-a", kind="documents", low_rps=0.6, peak_hour=14),
    Model(name="documents-b", kind="documents", low_rps=0.4, peak_hour=2),
    Model(name="chat-a", kind="chat", low_rps=1.2, peak_hour=19),
    Model(name="chat-b", kind="chat", low_rps=0.8, peak_hour=9),
    Model(name="code", kind="code", low_rps=0.6, peak_hour=11),
)


def day(model: Model, day_s: float, seed: int) -> Iterator[Arrival]:
    """Yield the requests of a day: Poisson at a rate that changes, by thinning."""
    rng = random.Random(seed)
    workload = KINDS[model.kind].workload()
    top = max(model.rate_rps(i / 1000) for i in range(1000))
    at_s, serial = 0.0, 0
    while (at_s := at_s + rng.expovariate(top)) < day_s:
        if rng.random() < model.rate_rps(at_s / day_s) / top:
            serial += 1
            yield workload.one(at_s, rng, serial)
