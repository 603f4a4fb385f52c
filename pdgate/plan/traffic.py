"""What the closed form needs of a workload: a stratified sample of prompts, moments of the decode work, burstiness."""

import math
from collections.abc import Callable, Sequence

import msgspec

from contracts.slo import SloTarget
from pdgate.plan.prefix import cached_tokens
from pdgate.plan.workload import Workload, mean

POINTS = 160  # strata of prompt length
MIN_WINDOWS = 20
OPEN_STEP_MS = 100.0  # and where there is no TPOT target
OPEN_WINDOW_S = 60.0  # window for burstiness where there is no TTFT target


class Prompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stratum of prompts; all strata are equally likely."""

    uncached_tokens: float
    cached_tokens: float


class DecodeMoments(msgspec.Struct, frozen=True, kw_only=True):
    """Moments of output tokens O and prompt tokens n of one request.

    A request that runs B-th of its O steps holds n + j tokens of KV at its j-th; sums over j are written out.
    """

    o: float
    o_squared: float
    kv: float  # E[n*O + O^2/2]: token-steps of resident KV
    kv_squared: float  # E[n^2*O + n*O^2 + O^3/3]: squared KV, summed over the steps
    prompt: float  # E[n + O]: KV tokens at the end


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """A workload under one assumption about the prefix cache."""

    rate_rps: float
    prompts: tuple[Prompt, ...]
    decode: DecodeMoments
    hit: float  # 0 to 1 of all prompt tokens
    prompt_dispersion: float  # variance over mean of arrivals per window of about the TTFT target; 1 = Poisson
    answer_dispersion: float  # the same for a window of about an answer's duration

    @property
    def mean_uncached_tokens(self) -> float:
        """Mean uncached prompt tokens."""
        return mean([p.uncached_tokens for p in self.prompts])

    @property
    def mean_cached_tokens(self) -> float:
        """Mean cached prompt tokens."""
        return mean([p.cached_tokens for p in self.prompts])

    def at(self, rate_rps: float) -> "Traffic":
        """Return the same traffic at another rate."""
        return msgspec.structs.replace(self, rate_rps=rate_rps)


def traffic_of(workload: Workload, cached: Sequence[int], *, prompt_window_s: float, answer_window_s: float) -> Traffic:
    """Return the traffic of a workload whose requests find `cached` tokens.

    Args:
        workload: the requests, at the rate to plan for.
        cached: cached tokens per request; at least one prompt token is always computed.
        prompt_window_s: window for the burstiness that prefill queues see, about the TTFT target.
        answer_window_s: window for the burstiness that decode batches see, about an answer's duration.
    """
    pairs = [
        (r.prompt_tokens - min(h, r.prompt_tokens - 1), min(h, r.prompt_tokens - 1))
        for r, h in zip(workload.requests, cached, strict=True)
    ]
    total = sum(r.prompt_tokens for r in workload.requests)
    return Traffic(
        rate_rps=workload.rate_rps,
        prompts=_strata(pairs),
        decode=decode_moments(workload),
        hit=sum(h for _, h in pairs) / total,
        prompt_dispersion=dispersion(workload, prompt_window_s),
        answer_dispersion=dispersion(workload, answer_window_s),
    )


def split_by_length(
    workload: Workload, cached: Sequence[int], *, uncached_tokens: int
) -> tuple[tuple[Workload, list[int]], tuple[Workload, list[int]]] | None:
    """Return the requests with at most so many uncached tokens and the others, each with its cached tokens.

    None if either part would have fewer than two requests.
    """
    parts: tuple[list[int], list[int]] = ([], [])
    for index, (request, hit) in enumerate(zip(workload.requests, cached, strict=True)):
        parts[request.prompt_tokens - hit > uncached_tokens].append(index)
    if min(map(len, parts)) < 2:
        return None
    short, long = (
        (
            msgspec.structs.replace(workload, requests=tuple(workload.requests[i] for i in part)),
            [cached[i] for i in part],
        )
        for part in parts
    )
    return short, long


def dispersion(workload: Workload, window_s: float) -> float:
    """Return variance over mean of the arrivals per window (index of dispersion); 1 = Poisson, at least 0.

    The squared coefficient of variation of inter-arrival times is its limit for renewal traffic; real traces are not
    renewal, and what a queue feels is the dispersion over windows of its own memory.
    """
    span_s = workload.span_s
    window_s = min(window_s, span_s / MIN_WINDOWS)
    if window_s <= 0:
        return 1.0
    windows = int(span_s / window_s)
    counts = [0] * windows
    start = workload.requests[0].arrival_s
    for request in workload.requests:
        index = int((request.arrival_s - start) / window_s)
        if index < windows:
            counts[index] += 1
    centre = mean(counts)
    return mean([(c - centre) ** 2 for c in counts]) / centre if centre else 1.0


class Traffics:
    """The workload's traffic under each cache size and length threshold, computed once each."""

    def __init__(
        self,
        workload: Workload,
        target: SloTarget,
        *,
        find_cached: Callable[[int | None], list[int]] | None = None,
        burstiness: float = 1.0,
    ) -> None:
        self._workload = workload
        self._target = target
        self._find_cached = find_cached or (lambda size: cached_tokens(workload, cache_tokens=size))
        self._burstiness = burstiness
        self._cached: dict[int | None, list[int]] = {0: [0] * len(workload.requests)}
        self._whole: dict[int | None, Traffic] = {}
        self._parts: dict[tuple[int | None, int], tuple[Traffic, Traffic, float] | None] = {}

    @property
    def rate_rps(self) -> float:
        """Rate of the workload."""
        return self._workload.rate_rps

    @property
    def moments(self) -> DecodeMoments:
        """Decode work of the workload, which no cache changes."""
        return self.whole(0).decode

    def scaled(
        self, *, prompt: float = 1.0, output: float = 1.0, hits: float = 1.0, burstiness: float = 1.0
    ) -> "Traffics":
        """Return the traffic with every prompt, answer, hit or the burstiness larger by a factor."""
        requests = tuple(
            msgspec.structs.replace(
                r,
                prompt_tokens=max(1, round(r.prompt_tokens * prompt)),
                output_tokens=max(1, round(r.output_tokens * output)),
            )
            for r in self._workload.requests
        )

        def find_cached(size: int | None) -> list[int]:
            found = self._hits(size)
            return [min(round(h * prompt * hits), r.prompt_tokens) for h, r in zip(found, requests, strict=True)]

        workload = msgspec.structs.replace(self._workload, requests=requests)
        return Traffics(workload, self._target, find_cached=find_cached, burstiness=self._burstiness * burstiness)

    def retargeted(self, target: SloTarget) -> "Traffics":
        """Return the same traffic under other targets, which set the windows of its burstiness."""
        return Traffics(self._workload, target, find_cached=self._hits, burstiness=self._burstiness)

    def by_prompt(self, most_tokens: int) -> tuple["Traffics", "Traffics", float] | None:
        """Return the traffic of prompts of at most so many tokens, that of the others, and the share of the former.

        None if either has fewer than two requests.
        """
        short = [r for r in self._workload.requests if r.prompt_tokens <= most_tokens]
        long = [r for r in self._workload.requests if r.prompt_tokens > most_tokens]
        if min(len(short), len(long)) < 2:
            return None
        one, two = (
            Traffics(
                msgspec.structs.replace(self._workload, requests=tuple(part)),
                self._target,
                burstiness=self._burstiness,
            )
            for part in (short, long)
        )
        return one, two, len(short) / len(self._workload.requests)

    def whole(self, cache_tokens: float | None) -> Traffic:
        """Return all traffic with caches of that size; None = unlimited."""
        size = _rounded(cache_tokens)
        if size not in self._whole:
            self._whole[size] = self._traffic(self._workload, self._hits(size))
        return self._whole[size]

    def parts(self, cache_tokens: float | None, threshold: int) -> tuple[Traffic, Traffic, float] | None:
        """Return short and long prompts' traffic and the share of short ones; None if there is nothing to part."""
        size = _rounded(cache_tokens)
        if (size, threshold) not in self._parts:
            parted = split_by_length(self._workload, self._hits(size), uncached_tokens=threshold)
            if parted is None:
                self._parts[size, threshold] = None
            else:
                short, long = (self._traffic(w, h) for w, h in parted)
                share = len(parted[0][0].requests) / len(self._workload.requests)
                self._parts[size, threshold] = short, long, share
        return self._parts[size, threshold]

    def _traffic(self, workload: Workload, cached: Sequence[int]) -> Traffic:
        answer_s = workload.mean_output_tokens * (self._target.tpot_ms or OPEN_STEP_MS) / 1000
        found = traffic_of(
            workload,
            cached,
            prompt_window_s=max(1.0, (self._target.ttft_ms or OPEN_WINDOW_S * 1000) / 1000),
            answer_window_s=max(1.0, answer_s),
        )
        return msgspec.structs.replace(
            found,
            prompt_dispersion=found.prompt_dispersion * self._burstiness,
            answer_dispersion=found.answer_dispersion * self._burstiness,
        )

    def _hits(self, size: int | None) -> list[int]:
        if size not in self._cached:
            self._cached[size] = self._find_cached(size)
        return self._cached[size]


def _strata(pairs: list[tuple[int, int]]) -> tuple[Prompt, ...]:
    """Means of equally many prompts each, ordered by uncached tokens."""
    ordered = sorted(pairs)
    points = min(POINTS, len(ordered))
    found = []
    for i in range(points):
        part = ordered[i * len(ordered) // points : (i + 1) * len(ordered) // points]
        found.append(Prompt(uncached_tokens=mean([n for n, _ in part]), cached_tokens=mean([h for _, h in part])))
    return tuple(found)


def decode_moments(workload: Workload) -> DecodeMoments:
    """Return the moments of a workload's decode work."""
    count = len(workload.requests)
    o = o_squared = kv = kv_squared = prompt = 0.0
    for request in workload.requests:
        n, out = float(request.prompt_tokens), float(request.output_tokens)
        o += out
        o_squared += out * out
        kv += n * out + out * out / 2
        kv_squared += n * n * out + n * out * out + out**3 / 3
        prompt += n + out
    return DecodeMoments(
        o=o / count, o_squared=o_squared / count, kv=kv / count, kv_squared=kv_squared / count, prompt=prompt / count
    )


def _rounded(tokens: float | None) -> int | None:
    """Cache sizes in powers of two: a hit rate hardly moves between, and each size costs a pass over the trace."""
    if tokens is None:
        return None
    return 0 if tokens < 1 else int(2 ** round(math.log2(tokens)))
