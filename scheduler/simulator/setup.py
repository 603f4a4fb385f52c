"""What a simulation is given: workers, costs, targets, policy and faults."""

import enum

import msgspec

from contracts.lifecycle import HandOff
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.slo import SloTarget
from scheduler.policy.cluster import Limits
from scheduler.policy.fairness import FairLimits, TokenWeights
from scheduler.policy.outlook import ScoringLimits
from scheduler.policy.queueing import Split
from scheduler.simulator.engine import EngineTraits

H100_8B = LatencyModel(
    prefill=PrefillCost(fixed_ms=8.0, per_token_ms=0.03, per_token_pair_ms=5e-7),
    decode=DecodeCost(fixed_ms=6.0, per_request_ms=0.02, per_kv_token_ms=4.5e-5),
    transfer=TransferCost(fixed_ms=1.0, bytes_per_ms=2.0e7, kv_bytes_per_token=131_072),
    kv_capacity_tokens=400_000,
)
"""An 8B model in BF16 on one H100 by its data sheet: 16 GB of weights and 131,072 B of KV a token read at 85 % of
3.35 TB/s in each step, prompts at half of 989 TFLOP/s, KV sent at 20 GB/s."""


class Placer(enum.StrEnum):
    """Which pure function places requests."""

    SCORED = "scored"  # policy.scoring, in the order of policy.fairness
    LEAST_LOADED = "least_loaded"  # policy.placement, in the order of policy.admission


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker dies and comes back empty."""

    at_s: float
    worker_id: str
    down_s: float = 60.0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated pool."""

    split: Split
    target: SloTarget
    latency: LatencyModel = H100_8B
    """What the engines really cost."""
    believed: LatencyModel | None = None
    """What the policy thinks they cost; None = the truth."""
    hand_off: HandOff = HandOff.DIRECT
    traits: EngineTraits | None = None
    """None = mixed steps of 0.9 times the TPOT target."""
    placer: Placer = Placer.SCORED
    limits: Limits = Limits()
    scoring: ScoringLimits = ScoringLimits()
    fair: FairLimits = FairLimits()
    weights: TokenWeights = TokenWeights()
    group_batches: bool = True
    """Batch lines that share a prefix run one after the other."""
    switch_s: float = 5.0
    """Prefill <-> decode under the direct hand-off, once the worker is empty."""
    restart_s: float = 60.0
    """To or from unified under the direct hand-off, once the worker is empty."""
    drain_cap_s: float = 60.0
    deadline_s: float = 120.0
    """Waiting longer than this is refused."""
    network_ms: float = 1.0
    """From the scheduler to a worker."""
    store_round_ms: float = 2.0
    """Under the store hand-off: the scheduler's turn between prefill and decode, besides writing and reading."""
    store_capacity_tokens: int = 4_000_000
    page_tokens: int = 64
    failures: tuple[Failure, ...] = ()
    seed: int = 1
    sample_s: float = 5.0

    @property
    def policy_latency(self) -> LatencyModel:
        """Costs as the policy knows them."""
        return self.believed or self.latency

    def engine_traits(self) -> EngineTraits:
        """Return the engines' set-up."""
        if self.traits is not None:
            return self.traits
        tpot_ms = self.target.tpot_ms
        return EngineTraits() if tpot_ms is None else EngineTraits(mixed_step_ms=0.9 * tpot_ms)

    def target_of(self, tier: str) -> SloTarget:
        """Return the targets of a tier: batch work has none."""
        return SloTarget() if tier == "batch" else self.target
