"""What placement goes by: its constants, and what is known or guessed of one request. Values only."""

from collections.abc import Mapping

import msgspec

from contracts.perf import LatencyModel
from contracts.slo import SloTarget

NO_HITS: Mapping[str, int] = {}


class ScoringLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the scored placement."""

    unified_up_to_tokens: int = 2048
    """Uncached prompt tokens up to which a unified worker is tried before a pair."""
    unified_within_steps: float = 2.0
    """The same limit as slack of this many decode steps; the lower one counts."""
    prefill_quota_ms: float = 250.0
    """Queued work up to which a prefill worker gets more. The rest waits in the scheduler, in its order."""
    tpot_share: float = 0.95
    """Share of the TPOT target up to which a decode worker's predicted step may grow."""
    unified_tpot_share: float = 0.88
    """The same on unified workers: what is left is for prompts."""
    mixed_share: float = 0.9
    """Share of the TPOT target that engines let a step with prompts take, as chunks are tuned in practice."""
    mixing_cost: float = 1.1
    """Cost of prompt tokens beside decodes over their cost alone."""
    late_share: float = 0.8
    """The part of either share that requests which give way may fill: the rest is for those in time."""
    slack: float = 0.1
    """Share of a target kept as a reserve when a path is judged."""
    near_ms: float = 3.0
    """Costs closer than this are equal; load, then the draw decides."""
    explore: float = 0.01
    """Share of requests sent to the second best prefill worker, so that its estimate stays honest."""
    affinity_ms: float = 30.0
    """What a session's home worker may be slower than the best."""
    affinity_load: float = 1.25
    """A session's home worker is kept while its load is at most this multiple of the mean (bounded loads)."""
    affinity_requests: int = 4
    """The same as a number of requests, for pools with little load; the higher bound counts."""
    prefix_load_gap: int = 64
    same_zone: bool = True
    """Whether both sides of a pair must be in one zone. If not, a pair in one zone still goes first."""
    prefix_load_ratio: float = 1.5
    """A worker's prefix hits do not count while it has more requests than the least loaded one by both."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What is known or guessed of one request, besides its size."""

    latency: LatencyModel
    """Costs of a worker of the pool."""
    target: SloTarget
    """The request's own targets."""
    resident_tpot_ms: float | None = None
    """TPOT target of the requests already on the workers; None = the request's own."""
    output_tokens: float
    """Expected output."""
    promised_output_tokens: int
    """Output for which KV memory is kept free."""
    cached_tokens: Mapping[str, int] = NO_HITS
    """Prompt tokens in each worker's prefix cache; absent = 0."""
    waited_ms: float = 0.0
    gives_way: bool = False
    """It is late already, and it is not its turn to go first all the same (FairQueue.gives_way)."""
    affinity: str = ""
    """Session or cache key; empty = none."""
    draw: float = 0.5
    """Uniform in [0, 1): the caller's randomness."""
    background: bool = False
    """Batch work: unified workers only, and only where it delays nobody."""

    @property
    def tpot_limit_ms(self) -> float:
        """Return the decode step that hurts nobody; infinite without a target."""
        own = self.target.tpot_ms or float("inf")
        return min(own, self.resident_tpot_ms or float("inf"))

    def held_on_average(self, prompt_tokens: int, samples: int) -> int:
        """Return the KV tokens of a request half-way through its answer: what its steps take as long as, on average."""
        return int(samples * (prompt_tokens + self.output_tokens / 2))
