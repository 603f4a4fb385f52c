"""Traffic as the planner sees it: requests with arrival, lengths and, if known, which prefixes they share."""

import math
from collections.abc import Sequence

import msgspec

HOUR_S = 3600.0
DAY_HOURS = 24
LEAST_HOURS = 6  # of a trace that has a daily curve


class WorkloadError(ValueError):
    """The traffic cannot be planned for; the message says what was wrong and where."""


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request of a trace."""

    arrival_s: float  # since the first request
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's prefix blocks, in order; equal id = equal prefix up to there
    cached_tokens: int | None = None  # as the serving engine reported it; None = not recorded
    session: str = ""  # whose turn it is; empty = not recorded


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A trace or the sample of a described load. Requests are ordered by arrival."""

    name: str
    requests: tuple[Request, ...]
    block_tokens: int = 512  # tokens of one prefix block
    source: str = ""  # where it comes from and its licence
    hourly: tuple[float, ...] = ()  # rate of each hour of the day over the mean, as recorded; empty = not known

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_rps(self) -> float:
        """Mean arrivals per second."""
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else 0.0

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt length in tokens."""
        return mean([r.prompt_tokens for r in self.requests])

    @property
    def mean_output_tokens(self) -> float:
        """Mean output length in tokens."""
        return mean([r.output_tokens for r in self.requests])

    def at_rate(self, rate_rps: float) -> "Workload":
        """Return the same requests with the arrivals stretched to `rate_rps`; burstiness is kept."""
        if rate_rps <= 0 or self.rate_rps <= 0:
            raise WorkloadError("a rate must be above zero requests per second")
        stretch = self.rate_rps / rate_rps
        moved = tuple(msgspec.structs.replace(r, arrival_s=r.arrival_s * stretch) for r in self.requests)
        return msgspec.structs.replace(self, requests=moved)


def workload_of(
    requests: Sequence[Request], *, name: str, block_tokens: int = 512, source: str = "", min_requests: int = 2
) -> Workload:
    """Return a workload of `requests`, ordered by arrival and starting at zero.

    Raises:
        WorkloadError: fewer than `min_requests`, or a request without prompt or output tokens.
    """
    if len(requests) < min_requests:
        raise WorkloadError(f"{name}: {len(requests)} usable requests; at least {min_requests} are needed")
    for number, request in enumerate(requests, start=1):
        if min(request.prompt_tokens, request.output_tokens) < 1:
            raise WorkloadError(
                f"{name}: request {number} has {request.prompt_tokens} prompt and {request.output_tokens} output "
                "tokens; both must be at least one"
            )
    ordered = sorted(requests, key=lambda r: r.arrival_s)
    start = ordered[0].arrival_s
    moved = tuple(msgspec.structs.replace(r, arrival_s=r.arrival_s - start) for r in ordered)
    return Workload(name=name, requests=moved, block_tokens=block_tokens, source=source, hourly=hourly(moved))


def hourly(requests: Sequence[Request]) -> tuple[float, ...]:
    """Return the rate of each hour from the first request on over the mean rate, days folded onto each other.

    Whole hours only; empty for a trace of less than six hours, which has no daily curve.
    """
    hours = int(requests[-1].arrival_s // HOUR_S)
    if hours < LEAST_HOURS:
        return ()
    counts = [0] * hours
    for request in requests:
        hour = int(request.arrival_s // HOUR_S)
        if hour < hours:
            counts[hour] += 1
    centre = mean(counts)
    return tuple(mean(counts[h::DAY_HOURS]) / centre for h in range(min(hours, DAY_HOURS)))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 for no values."""
    return math.fsum(values) / len(values) if values else 0.0


def squared_cv(values: Sequence[float]) -> float:
    """Squared coefficient of variation: variance over squared mean; 0 for no values or a zero mean."""
    centre = mean(values)
    return mean([(v - centre) ** 2 for v in values]) / centre**2 if centre else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the ascending values lie, linearly interpolated."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
