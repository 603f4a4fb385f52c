"""Since when load has been the same. Pure.

Where load changes, so may the number of workers. Where it does not, what changes is only what is thought of it: which
requests the last minutes happened to bring, and what was learned from them. So the longer load has been the same, the
longer fewer workers must have been enough before one goes (`ScaleLimits.window_s`): a need of lately still holds.
"""

import math

import msgspec

from scheduler.policy.arrivals import RateForecast

_DOUBT = 3.0
"""Standard errors between two rates that are no difference."""
_BETTER = 0.75
"""Share of its standard error that a rate must have to be put in the place of one that is the same."""


class Plateau(msgspec.Struct, frozen=True, kw_only=True):
    """A rate that has not changed."""

    rate_rps: float
    error_rps: float
    """Standard error of the rate: who has looked for longer knows it better."""
    since_s: float

    def age_s(self, now_s: float) -> float:
        """Return for how long."""
        return max(0.0, now_s - self.since_s)


def plateau_of(before: Plateau | None, rate: RateForecast | None, now_s: float, *, band: float) -> Plateau | None:
    """Return the plateau that a rate is on: the one of before, if it is within `band` (a share) of it, or a new one."""
    if rate is None:
        return None
    here = Plateau(rate_rps=rate.now_rps, error_rps=rate.error_rps, since_s=now_s)
    if before is None:
        return here
    apart_rps = abs(here.rate_rps - before.rate_rps) - _DOUBT * math.hypot(here.error_rps, before.error_rps)
    if apart_rps > band * before.rate_rps:
        return here
    better = here.error_rps < _BETTER * before.error_rps
    return msgspec.structs.replace(here, since_s=before.since_s) if better else before
