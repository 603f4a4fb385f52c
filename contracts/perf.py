"""Latency of prefill, decode and KV transfer as closed forms. Pure; units in every name.

Prefill  S = a + b*n_u + c*(n_u^2 + 2*h*n_u)   (DistServe's form; the h cross-term is attention to the cached prefix)
Decode   t(B, K) = d0 + d1*B + d2*K
Transfer T = t0 + bytes / B_eff
"""

import msgspec


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one prefill, ms."""

    fixed_ms: float
    per_token_ms: float
    per_token_pair_ms: float = 0.0

    def ms(self, uncached_tokens: int, cached_tokens: int = 0) -> float:
        """Return the compute time of one prompt, ms."""
        pairs = uncached_tokens * uncached_tokens + 2 * cached_tokens * uncached_tokens
        return self.fixed_ms + self.per_token_ms * uncached_tokens + self.per_token_pair_ms * pairs


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one decode step, ms."""

    fixed_ms: float
    per_request_ms: float = 0.0
    per_kv_token_ms: float = 0.0

    def step_ms(self, num_requests: int, kv_tokens: int) -> float:
        """Return the time of one step that yields one token for each of `num_requests`, ms."""
        return self.fixed_ms + self.per_request_ms * num_requests + self.per_kv_token_ms * kv_tokens


class TransferCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one KV hand-off."""

    fixed_ms: float
    bytes_per_ms: float
    kv_bytes_per_token: int

    def ms(self, tokens: int) -> float:
        """Return the time to move the KV cache of `tokens`, ms."""
        return self.fixed_ms + tokens * self.kv_bytes_per_token / self.bytes_per_ms

    def exposed_ms(self, tokens: int, prefill_ms: float, layers: int) -> float:
        """Return what a layer-by-layer push leaves visible after `prefill_ms` of compute, ms.

        The last layer's share can only start when the compute ends; a slow link is visible beyond the compute.
        """
        whole = self.ms(tokens)
        return max(whole / layers, whole - prefill_ms)


class WeightsCost(msgspec.Struct, frozen=True, kw_only=True):
    """Moving a worker's weights between host and device memory: what going to sleep, and waking, takes."""

    bytes: int
    """Of one worker, over all its devices."""
    bytes_per_ms: float
    """Of the links between host and its devices together."""
    fixed_ms: float = 0.0

    @property
    def ms(self) -> float:
        """One way, ms."""
        return self.fixed_ms + self.bytes / self.bytes_per_ms


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's costs: what the timed engine plays and the scheduler predicts with."""

    prefill: PrefillCost
    decode: DecodeCost
    transfer: TransferCost
    kv_capacity_tokens: int
    max_running: int = 256
    front_ms: float = (
        0.0  # latency of an unloaded request outside the engine's compute; adds to TTFT, takes no capacity
    )
    weights: WeightsCost | None = None  # None = it cannot sleep, or nothing is known of it


# Llama-3-8B in BF16 on one H100, rounded from the planner's fit (`python -m benches.plan_fit`): a stand-in for fleets.
DEFAULT_LATENCY = LatencyModel(
    prefill=PrefillCost(fixed_ms=7.5, per_token_ms=0.015, per_token_pair_ms=8.8e-7),
    decode=DecodeCost(fixed_ms=6.7, per_request_ms=0.07, per_kv_token_ms=3.7e-5),
    transfer=TransferCost(fixed_ms=0.4, bytes_per_ms=3.4e7, kv_bytes_per_token=131_072),
    kv_capacity_tokens=400_000,
)
