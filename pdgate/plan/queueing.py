"""Waiting times of a pool of workers: M/G/c after Allen and Cunneen, with bursty arrivals.

The mean wait is Erlang's times half the sum of the arrivals' dispersion and the service's squared coefficient of
variation; given that a request waits at all, its wait is taken as exponential.
"""

import math
from collections.abc import Sequence

import msgspec

LARGE = 60  # servers from which a limit stands for Erlang's recursion
ENDLESS = 8.0  # standard deviations of spare servers beyond which nobody waits
NEGLIGIBLE = 1e-4  # a wait that fewer requests see than this is left out


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the wait: zero with probability 1 - `delayed`, else exponential with mean `mean_delay_ms`."""

    delayed: float  # 0 to 1
    mean_delay_ms: float

    @property
    def mean_ms(self) -> float:
        """Mean wait over all requests."""
        return self.delayed * self.mean_delay_ms


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Two independent waits one after the other."""

    first: Wait
    second: Wait

    @property
    def stable(self) -> bool:
        """Whether both waits end."""
        return not math.isinf(self.first.mean_delay_ms) and not math.isinf(self.second.mean_delay_ms)

    @property
    def longest_ms(self) -> float:
        """The larger mean of a wait that happens."""
        return max(self.first.mean_delay_ms, self.second.mean_delay_ms)

    def within_all(self, limits_ms: Sequence[float]) -> float:
        """Return the probability (0 to 1), averaged over equally likely limits, that both end within the limit."""
        if not limits_ms or not self.stable:
            return 0.0
        met = [limit for limit in limits_ms if limit >= 0]
        one, two = self.first, self.second
        if one.delayed <= NEGLIGIBLE or one.mean_delay_ms <= 0:
            one, two = two, one
        if one.delayed <= NEGLIGIBLE or one.mean_delay_ms <= 0:
            return len(met) / len(limits_ms)
        m1, m2, exp = one.mean_delay_ms, two.mean_delay_ms, math.exp
        if two.delayed <= NEGLIGIBLE or m2 <= 0:
            late = one.delayed * sum([exp(-limit / m1) for limit in met])
            return (len(met) - late) / len(limits_ms)
        if abs(m1 - m2) < 1e-6 * m1:
            m2 *= 1 - 1e-5  # the sum of two like exponentials, as the limit of unlike ones
        both = one.delayed * two.delayed
        a = one.delayed * (1 - two.delayed) + both * m1 / (m1 - m2)
        b = (1 - one.delayed) * two.delayed - both * m2 / (m1 - m2)
        late = sum([a * exp(-limit / m1) + b * exp(-limit / m2) for limit in met])
        return (len(met) - late) / len(limits_ms)


NONE = Wait(delayed=0.0, mean_delay_ms=0.0)
UNSTABLE = Wait(delayed=1.0, mean_delay_ms=math.inf)


def erlang_c(servers: int, load: float) -> float:
    """Return the probability (0 to 1) that a customer of M/M/c waits.

    Args:
        servers: number of servers, at least one.
        load: arrival rate times mean service, in servers; below `servers`.
    """
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    if servers > LARGE:
        # Halfin and Whitt's limit: exact to a percent here, and free of the recursion
        spare = (1 - load / servers) * math.sqrt(servers)
        if spare > ENDLESS:
            return 0.0
        below = 0.5 * (1 + math.erf(spare / math.sqrt(2)))
        density = math.exp(-spare * spare / 2) / math.sqrt(2 * math.pi)
        return 1 / (1 + spare * below / density)
    blocked = 1.0  # Erlang B by its stable recursion
    for busy in range(1, servers + 1):
        blocked = load * blocked / (busy + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait(
    *, servers: int, rate_rps: float, mean_service_ms: float, service_squared_cv: float, dispersion: float
) -> Wait:
    """Return the wait in a pool of `servers` that share one queue.

    Args:
        servers: workers of the pool.
        rate_rps: arrivals per second.
        mean_service_ms: mean service time.
        service_squared_cv: squared coefficient of variation of the service time.
        dispersion: variance over mean of the arrivals per window; 1 = Poisson.
    """
    load = rate_rps * mean_service_ms / 1000
    if load >= servers:
        return UNSTABLE
    delayed = erlang_c(servers, load)
    if delayed <= 0:
        return NONE
    spread = (dispersion + service_squared_cv) / 2
    return Wait(delayed=delayed, mean_delay_ms=mean_service_ms / (servers - load) * spread)


def normal_below(limit: float, centre: float, deviation: float) -> float:
    """Return the probability (0 to 1) that a normal value is at most `limit`."""
    if math.isinf(limit):
        return 1.0
    if deviation <= 0:
        return 1.0 if centre <= limit else 0.0
    return 0.5 * (1 + math.erf((limit - centre) / (deviation * math.sqrt(2))))


def quantile_of_sum(fixed_ms: Sequence[float], waiting: Waits, share: float) -> float:
    """Return the quantile of (one of `fixed_ms`, equally likely) + waits, by bisection; infinite if unstable."""
    if not waiting.stable:
        return math.inf
    low, high = 0.0, max(fixed_ms) + 60 * waiting.longest_ms + 1e-9
    for _ in range(50):
        middle = (low + high) / 2
        below = waiting.within_all([middle - f for f in fixed_ms])
        low, high = (middle, high) if below < share else (low, middle)
    return high
