"""Latency targets that a request names for itself: `x-pdgate-slo: ttft=800ms,tpot=40ms,itl_p99=90ms,e2e=20s`. Pure.

A key or its project may have targets of their own in place of the tier's. Whatever a request names replaces them as
a whole, so that a summary may ask for its end alone. A target goes down to what the key or its project allows, else
to the one it replaces: more loose is always allowed, stricter only by agreement. What is asked beyond that is moved
to the bound.
"""

import math
import re
from collections.abc import Sequence
from typing import Final

from contracts.errors import BadRequest
from contracts.slo import SloTarget
from gateway.scopes import Scopes

HEADER: Final = "x-pdgate-slo"
MAX_WAIT: Final = "x-pdgate-max-wait"
_FIELDS: Final = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl_p99": "itl_p99_ms", "e2e": "e2e_ms"}
_VALUE = re.compile(r"(\d{1,7}(?:\.\d{1,3})?)(ms|s)")
_LONGEST_MS: Final = 86_400_000.0


def read_targets(header: str) -> SloTarget | None:
    """Return the targets in a header's value; None when it is empty. Raises BadRequest."""
    if not header.strip():
        return None
    found: dict[str, float] = {}
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        field, match = _FIELDS.get(name.strip()), _VALUE.fullmatch(value.strip())
        if field is None or match is None or field in found:
            raise BadRequest(
                f"{HEADER} is a list such as 'ttft=800ms,tpot=40ms'; it may name ttft, tpot, itl_p99 and e2e once.",
                param=HEADER,
            )
        ms = float(match[1]) * (1000 if match[2] == "s" else 1)
        if not 0 < ms <= _LONGEST_MS:
            raise BadRequest(f"{HEADER}: {name} must be more than 0 and at most a day.", param=HEADER)
        found[field] = ms
    return SloTarget(**found)


def read_max_wait(header: str) -> float:
    """Return how long a request may wait for a model that sleeps, s: `x-pdgate-max-wait: 20s`; infinite when empty.

    Raises:
        BadRequest: it is no time.
    """
    if not header.strip():
        return math.inf
    match = _VALUE.fullmatch(header.strip())
    if match is None:
        raise BadRequest(f"{MAX_WAIT} is a time such as '20s' or '500ms'; '0s' refuses to wait.", param=MAX_WAIT)
    return float(match[1]) * (1.0 if match[2] == "s" else 0.001)


def targets_of(asked: SloTarget | None, tier: SloTarget, bounds: Sequence[Scopes]) -> SloTarget:
    """Return the targets that a request gets: its own within what is allowed, else its key's, project's or tier's."""
    usual = next((scopes.slo for scopes in bounds if scopes.slo is not None), tier)
    if asked is None:
        return usual
    ttft_ms = _strictest([scopes.strictest_ttft_ms for scopes in bounds], usual.ttft_ms or tier.ttft_ms)
    tpot_ms = _strictest([scopes.strictest_tpot_ms for scopes in bounds], usual.tpot_ms or tier.tpot_ms)
    return SloTarget(
        ttft_ms=_at_least(asked.ttft_ms, ttft_ms),
        tpot_ms=_at_least(asked.tpot_ms, tpot_ms),
        itl_p99_ms=_at_least(asked.itl_p99_ms, usual.itl_p99_ms or tpot_ms),
        e2e_ms=_at_least(asked.e2e_ms, usual.e2e_ms or ttft_ms),
    )


def _strictest(agreed: Sequence[float | None], tier_ms: float | None) -> float | None:
    """Return the bound: the loosest of those agreed with key and project, else the tier's target."""
    named = [ms for ms in agreed if ms is not None]
    return max(named) if named else tier_ms


def _at_least(asked_ms: float | None, bound_ms: float | None) -> float | None:
    return max(asked_ms, bound_ms) if asked_ms is not None and bound_ms is not None else asked_ms
