"""Waiting times of a pool of workers: M/G/c after Allen and Cunneen, with bursty arrivals.

The mean wait is Erlang's times half the sum of the arrivals' dispersion and the service's squared coefficient of
variation; given that a request waits at all, its wait is taken as exponential.
"""

import math
from collections.abc import Sequence

import msgspec


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the wait: zero with probability 1 - `delayed`, else exponential with mean `mean_delay_ms`."""

    delayed: float  # 0 to 1
    mean_delay_ms: float

    @property
    def mean_ms(self) -> float:
        """Mean wait over all requests."""
        return self.delayed * self.mean_delay_ms

    def within(self, limit_ms: float) -> float:
        """Return the probability (0 to 1) that the wait is at most `limit_ms`."""
        if limit_ms < 0:
            return 0.0
        if math.isinf(self.mean_delay_ms):
            return 0.0
        return 1 - self.delayed * math.exp(-limit_ms / self.mean_delay_ms) if self.mean_delay_ms > 0 else 1.0

    def within_all(self, limits_ms: Sequence[float]) -> float:
        """Return the mean of `within` over equally likely limits; written out, since searches spend their time here."""
        if not limits_ms or math.isinf(self.mean_delay_ms):
            return 0.0
        met = [limit for limit in limits_ms if limit >= 0]
        if self.delayed <= 0 or self.mean_delay_ms <= 0:
            return len(met) / len(limits_ms)
        exp, rate = math.exp, -1 / self.mean_delay_ms
        late = sum([exp(limit * rate) for limit in met])
        return (len(met) - self.delayed * late) / len(limits_ms)


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
        return Wait(delayed=0.0, mean_delay_ms=0.0)
    spread = (dispersion + service_squared_cv) / 2
    return Wait(delayed=delayed, mean_delay_ms=mean_service_ms / (servers - load) * spread)


def normal_below(limit: float, centre: float, deviation: float) -> float:
    """Return the probability (0 to 1) that a normal value is at most `limit`."""
    if math.isinf(limit):
        return 1.0
    if deviation <= 0:
        return 1.0 if centre <= limit else 0.0
    return 0.5 * (1 + math.erf((limit - centre) / (deviation * math.sqrt(2))))


def quantile_of_sum(fixed_ms: Sequence[float], waiting: Wait, share: float) -> float:
    """Return the quantile of (one of `fixed_ms`, equally likely) + wait, by bisection; infinite if unstable."""
    if math.isinf(waiting.mean_delay_ms):
        return math.inf
    low, high = 0.0, max(fixed_ms) + 60 * waiting.mean_delay_ms + 1e-9
    for _ in range(50):
        middle = (low + high) / 2
        below = waiting.within_all([middle - f for f in fixed_ms])
        low, high = (middle, high) if below < share else (low, middle)
    return high
