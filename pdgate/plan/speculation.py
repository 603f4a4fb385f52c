"""Speculative decoding as an axis of the plan. Drafting and verifying both run in the decode loop.

A step drafts `k` tokens and verifies them with one pass over `k + 1` positions; with each draft accepted with
probability `a`, independently, it yields `(1 - a^(k+1)) / (1 - a)` tokens (Leviathan et al., ICML 2023, equation 1).
"""

import re

import msgspec

from contracts.perf import DecodeCost
from pdgate.plan.workload import WorkloadError

PART = re.compile(r"(accept|tokens|draft)\s*=\s*(\d+(?:\.\d+)?)")


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How drafts are made and how good they are."""

    acceptance: float  # 0 to below 1: probability that a drafted token is accepted
    drafted_tokens: int = 3  # per step
    draft_cost: float = 0.05  # time of drafting one token over a step without speculation, at the same batch

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens that one step yields, the verified one included."""
        return (1 - self.acceptance ** (self.drafted_tokens + 1)) / (1 - self.acceptance)

    @property
    def positions(self) -> int:
        """Positions of each request that one step computes."""
        return self.drafted_tokens + 1

    def per_token(self, step: DecodeCost) -> DecodeCost:
        """Return the cost per yielded token of a step whose `per_request_ms` is that of one position.

        Weights and KV cache are read once for all positions; arithmetic and what goes with it is paid for each.
        """
        slower = (1 + self.drafted_tokens * self.draft_cost) / self.tokens_per_step
        return DecodeCost(
            fixed_ms=step.fixed_ms * slower,
            per_request_ms=step.per_request_ms * self.positions * slower,
            per_kv_token_ms=step.per_kv_token_ms * slower,
        )


def parse_speculation(text: str) -> Speculation:
    """Return the speculation of "accept=0.7,tokens=3,draft=0.05"; all but `accept` may be left out.

    Raises:
        WorkloadError: not of that form, or out of range.
    """
    found: dict[str, float] = {}
    for part in text.lower().split(","):
        match = PART.fullmatch(part.strip())
        if match is None or match[1] in found:
            raise WorkloadError(f"--speculate: {text!r} is not like accept=0.7,tokens=3,draft=0.05")
        found[match[1]] = float(match[2])
    tokens, draft = found.get("tokens", 3.0), found.get("draft", 0.05)
    if not 0 <= found.get("accept", -1.0) < 1 or not 1 <= tokens <= 16 or tokens % 1 or draft > 1:
        raise WorkloadError("--speculate: accept is 0 to below 1, tokens 1 to 16, draft at most 1")
    return Speculation(acceptance=found["accept"], drafted_tokens=int(tokens), draft_cost=draft)
