"""SLO targets and whether one request met them."""

import msgspec


class SloTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Latency targets of one tier; None = no target of that kind."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished request saw, measured at the gateway."""

    ttft_ms: float
    decode_ms: float  # first token sent -> last token sent
    decode_tokens: int  # all sampled tokens, the first included
    queue_ms: float = 0.0  # inbox: written -> placed
    prefill_ms: float = 0.0  # worker: accepted -> prompt computed
    transfer_ms: float = 0.0  # KV hand-off as the decode side saw it
    total_ms: float = 0.0  # arrival -> settled

    @property
    def tpot_ms(self) -> float:
        """Mean ms per token after the first; 0 for a one-token answer."""
        return self.decode_ms / (self.decode_tokens - 1) if self.decode_tokens > 1 else 0.0


def met(seen: Timings, target: SloTarget) -> bool:
    """Return whether a request met every target of its tier."""
    ttft_ok = target.ttft_ms is None or seen.ttft_ms <= target.ttft_ms
    return ttft_ok and (target.tpot_ms is None or seen.tpot_ms <= target.tpot_ms)
