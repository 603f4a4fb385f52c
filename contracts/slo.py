"""SLO targets and whether one request met them."""

import msgspec


class SloTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Latency targets of a tier or a request, any subset; None = no target of that kind."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_p99_ms: float | None = None
    """The gap that 99 in 100 gaps between tokens of the request do not exceed."""
    e2e_ms: float | None = None
    """Arrival to the last token."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished request saw, measured at the gateway."""

    ttft_ms: float
    decode_ms: float  # first token sent -> last token sent
    decode_tokens: int  # all sampled tokens, the first included
    queue_ms: float = 0.0  # inbox: written -> placed
    prefill_ms: float = 0.0  # worker: accepted -> prompt computed
    transfer_ms: float = 0.0  # KV hand-off as the decode side saw it
    total_ms: float = 0.0  # arrival -> settled
    itl_p99_ms: float | None = None  # of the gaps between deliveries; None = not measured

    @property
    def tpot_ms(self) -> float:
        """Mean ms per token after the first; 0 for a one-token answer."""
        return self.decode_ms / (self.decode_tokens - 1) if self.decode_tokens > 1 else 0.0


def met(seen: Timings, target: SloTarget) -> bool:
    """Return whether a request met every one of its targets. A gap that was not measured counts as met."""
    return (
        (target.ttft_ms is None or seen.ttft_ms <= target.ttft_ms)
        and (target.tpot_ms is None or seen.tpot_ms <= target.tpot_ms)
        and (target.itl_p99_ms is None or seen.itl_p99_ms is None or seen.itl_p99_ms <= target.itl_p99_ms)
        and (target.e2e_ms is None or seen.ttft_ms + seen.decode_ms <= target.e2e_ms)
    )
