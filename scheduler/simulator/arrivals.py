"""What arrives, and when: generated workloads, and ways to cut and join them. Times are seconds from the start."""

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence

import msgspec

BLOCK_TOKENS = 512
"""Prompt tokens per prefix block; the unit of the public conversation trace."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the outside sends it. The policy sees all of it but `output_tokens`."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 4096
    tenant: str = "tenant"
    tier: str = "default"
    session: str = ""
    blocks: tuple[int, ...] = ()  # ids of the prompt's prefix blocks, BLOCK_TOKENS each, the last may be partial
    regime: str = ""  # label for reports


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """A lognormal length, by its median and the ratio of its 90th percentile to its median."""

    median: float
    p90_over_median: float = 1.0
    lowest: int = 1
    highest: int = 200_000

    def draw(self, rng: random.Random) -> int:
        """Return one length in tokens."""
        sigma = math.log(self.p90_over_median) / 1.2816 if self.p90_over_median > 1 else 0.0
        value = self.median * math.exp(sigma * rng.gauss(0.0, 1.0)) if sigma else self.median
        return int(min(max(value, self.lowest), self.highest))


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Independent requests of one kind.

    With `shared_prefixes` > 0 each prompt starts with one of that many prefixes of `prefix_tokens`.
    """

    prompt: Lengths
    output: Lengths
    rate_rps: float
    name: str = ""
    tenant: str = "tenant"
    tier: str = "default"
    max_tokens: int = 4096
    shared_prefixes: int = 0
    prefix_tokens: int = 0

    def one(self, at_s: float, rng: random.Random, serial: int) -> Arrival:
        """Return a request of this kind; `serial` makes its unshared blocks unique."""
        prompt = self.prompt.draw(rng)
        blocks: tuple[int, ...] = ()
        if self.shared_prefixes:
            prompt += self.prefix_tokens
            chosen = rng.randrange(self.shared_prefixes)
            blocks = prefix_blocks(chosen, self.prefix_tokens, prompt, serial)
        return Arrival(
            at_s=at_s,
            prompt_tokens=prompt,
            output_tokens=min(self.output.draw(rng), self.max_tokens),
            max_tokens=self.max_tokens,
            tenant=self.tenant,
            tier=self.tier,
            blocks=blocks,
            regime=self.name,
        )


def prefix_blocks(prefix: int, prefix_tokens: int, prompt_tokens: int, serial: int) -> tuple[int, ...]:
    """Return block ids of a prompt that begins with a shared prefix; the rest is its own."""
    shared = prefix_tokens // BLOCK_TOKENS
    total = -(-prompt_tokens // BLOCK_TOKENS)
    own = 1_000_000_000 + serial * 1024
    return tuple(-1 - prefix * 1024 - i for i in range(shared)) + tuple(own + i for i in range(total - shared))


def poisson(workload: Workload, *, duration_s: float, seed: int, start_s: float = 0.0) -> Iterator[Arrival]:
    """Yield requests of a Poisson process."""
    rng = random.Random(seed)  # noqa: S311 (a simulation, not a secret)
    at_s, serial = start_s, int(start_s * 1000) % 1_000_000 * 1000
    while True:
        at_s += rng.expovariate(workload.rate_rps)
        if at_s >= start_s + duration_s:
            return
        serial += 1
        yield workload.one(at_s, rng, serial)


def regimes(workloads: Sequence[Workload], *, period_s: float, duration_s: float, seed: int) -> Iterator[Arrival]:
    """Yield the workloads in turn, `period_s` each, until `duration_s`."""
    start_s, turn = 0.0, 0
    while start_s < duration_s:
        length_s = min(period_s, duration_s - start_s)
        yield from poisson(
            workloads[turn % len(workloads)], duration_s=length_s, seed=seed * 1009 + turn, start_s=start_s
        )
        start_s += length_s
        turn += 1


def burst(
    workload: Workload, *, factor: float, from_s: float, length_s: float, duration_s: float, seed: int
) -> Iterator[Arrival]:
    """Yield a Poisson process whose rate is `factor` times higher for `length_s` from `from_s` on."""
    extra = msgspec.structs.replace(workload, rate_rps=workload.rate_rps * (factor - 1))
    return merged(
        poisson(workload, duration_s=duration_s, seed=seed),
        poisson(extra, duration_s=length_s, seed=seed + 1, start_s=from_s),
    )


def merged(*streams: Iterable[Arrival]) -> Iterator[Arrival]:
    """Yield several streams as one, in the order of time."""
    return heapq.merge(*streams, key=lambda arrival: arrival.at_s)


def faster(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """Yield the same requests at `factor` times the rate."""
    for arrival in arrivals:
        yield msgspec.structs.replace(arrival, at_s=arrival.at_s / factor)


def overlaid(arrivals: Sequence[Arrival], *, copies: int, length_s: float, seed: int) -> list[Arrival]:
    """Return `copies` times the load of a trace, `length_s` long: each copy is another stretch of it, wrapping round.

    The stretches begin at evenly spaced places, shifted together by the seed; the time scale and its bursts stay.
    Each copy's prefix blocks are its own.
    """
    whole_s = arrivals[-1].at_s + 1.0
    rng = random.Random(seed)  # noqa: S311
    shift_s = rng.uniform(0, whole_s)
    found: list[Arrival] = []
    for copy in range(copies):
        from_s = (shift_s + copy * whole_s / copies) % whole_s
        for arrival in arrivals:
            at_s = (arrival.at_s - from_s) % whole_s
            if at_s < length_s:
                blocks = tuple(block * copies + copy for block in arrival.blocks)
                found.append(msgspec.structs.replace(arrival, at_s=at_s, blocks=blocks))
    return sorted(found, key=lambda arrival: arrival.at_s)


def window(arrivals: Iterable[Arrival], *, from_s: float, length_s: float) -> Iterator[Arrival]:
    """Yield the requests of a part of a trace, with times from its start."""
    for arrival in arrivals:
        if arrival.at_s >= from_s + length_s:
            return
        if arrival.at_s >= from_s:
            yield msgspec.structs.replace(arrival, at_s=arrival.at_s - from_s)


def jittered(arrivals: Sequence[Arrival], *, by_s: float, seed: int) -> list[Arrival]:
    """Return the requests with each time moved by up to ± `by_s`: another sample of the same load."""
    rng = random.Random(seed)  # noqa: S311
    moved = (msgspec.structs.replace(a, at_s=max(0.0, a.at_s + rng.uniform(-by_s, by_s))) for a in arrivals)
    return sorted(moved, key=lambda arrival: arrival.at_s)
