"""Traffic from a description, and the presets of `pdgate plan --preset`. Seeded, so that a plan is reproducible."""

import math
import random
from pathlib import Path

import msgspec

from pdgate.plan.traces import read_trace
from pdgate.plan.workload import Request, Workload, WorkloadError, workload_of

DATA = Path(__file__).with_name("data")
SAMPLE = 4000  # requests of a described workload
BLOCK_TOKENS = 64
HOT_PREFIXES = 20  # shared system prompts or documents of single-turn traffic
THINK_S = 20.0  # mean pause between an answer and the session's next turn


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A load in a few numbers. Shares are 0 to 1; coefficients of variation are >= 0."""

    rate_rps: float
    prompt_tokens: float
    output_tokens: float
    prompt_cv: float = 1.0
    output_cv: float = 1.0
    arrival_cv: float = 1.0  # of inter-arrival times; 1 = Poisson
    prefix_reuse: float = 0.0  # share of prompt tokens that an unlimited cache would hold
    turns: int = 1  # requests of one session; with more than one, the reuse is the session's own history
    seed: int = 1
    sample: int = SAMPLE


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of traffic and the targets it usually has."""

    about: str
    ttft_ms: float | None
    tpot_ms: float | None
    trace: str = ""
    described: Description | None = None


PRESETS = {
    "chat": Preset(
        about="short prompts and answers: Azure's conversation trace",
        ttft_ms=1000,
        tpot_ms=50,
        trace="AzureLLMInferenceTrace_conv.csv.xz",
    ),
    "agent": Preset(
        about="long prompts that grow turn by turn: Mooncake's conversation trace",
        ttft_ms=5000,
        tpot_ms=40,
        trace="conversation_trace.jsonl.xz",
    ),
    "rag": Preset(
        about="retrieved passages in front of a question, a fifth of the tokens shared",
        ttft_ms=2000,
        tpot_ms=50,
        described=Description(
            rate_rps=4, prompt_tokens=6000, output_tokens=300, prompt_cv=0.5, output_cv=0.8, prefix_reuse=0.2
        ),
    ),
    "docs": Preset(
        about="whole documents summarised",
        ttft_ms=10_000,
        tpot_ms=60,
        described=Description(rate_rps=1, prompt_tokens=30_000, output_tokens=800, prompt_cv=0.7, output_cv=0.5),
    ),
    "batch": Preset(
        about="offline work without latency targets",
        ttft_ms=None,
        tpot_ms=None,
        described=Description(rate_rps=10, prompt_tokens=2000, output_tokens=500),
    ),
}


def preset_workload(name: str) -> tuple[Preset, Workload]:
    """Return a preset and its traffic.

    Raises:
        WorkloadError: no such preset (the known ones are named).
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise WorkloadError(f"preset {name!r} is not one of {', '.join(PRESETS)}")
    if preset.described is not None:
        return preset, sample(preset.described, name=name)
    return preset, msgspec.structs.replace(read_trace(DATA / preset.trace), name=f"{name} ({preset.trace})")


def sample(load: Description, *, name: str = "described") -> Workload:
    """Return requests drawn from a description.

    Lengths are lognormal and inter-arrival times gamma; the drawn values are scaled so that the sample's mean lengths
    and rate are the described ones.

    Raises:
        WorkloadError: a number outside its range.
    """
    _check(load)
    rng = random.Random(load.seed)  # noqa: S311 - a simulation, not a secret
    requests = _single_turns(load, rng) if load.turns == 1 else _sessions(load, rng)
    drawn = workload_of(requests, name=name, block_tokens=BLOCK_TOKENS, source="described").at_rate(load.rate_rps)
    return msgspec.structs.replace(drawn, source=f"described, seed {load.seed}", hourly=())


def _check(load: Description) -> None:
    if min(load.rate_rps, load.prompt_tokens, load.output_tokens) <= 0:
        raise WorkloadError("rate, prompt tokens and output tokens must be above zero")
    if min(load.prompt_cv, load.output_cv, load.arrival_cv) < 0:
        raise WorkloadError("coefficients of variation must not be below zero")
    if not 0 <= load.prefix_reuse < 1 or load.turns < 1 or load.sample < 2:
        raise WorkloadError("prefix reuse must be 0 to below 1, turns at least 1, the sample at least 2 requests")


def _lognormal(rng: random.Random, count: int, mean: float, cv: float) -> list[float]:
    sigma = math.sqrt(math.log1p(cv * cv))
    drawn = [rng.lognormvariate(0.0, sigma) if sigma else 1.0 for _ in range(count)]
    scale = mean * count / math.fsum(drawn)
    return [value * scale for value in drawn]


def _arrivals(rng: random.Random, count: int, cv: float) -> list[float]:
    if cv == 0:
        return [float(i) for i in range(count)]
    shape = 1 / (cv * cv)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(shape, 1 / shape)
    return times


def _single_turns(load: Description, rng: random.Random) -> list[Request]:
    prompts = _lognormal(rng, load.sample, load.prompt_tokens, load.prompt_cv)
    outputs = _lognormal(rng, load.sample, load.output_tokens, load.output_cv)
    popularity = [1 / (rank + 1) for rank in range(HOT_PREFIXES)]
    requests = []
    fresh = 1 << 40
    for at, prompt, output in zip(_arrivals(rng, load.sample, load.arrival_cv), prompts, outputs, strict=True):
        tokens = max(1, round(prompt))
        shared = round(tokens * load.prefix_reuse / BLOCK_TOKENS)
        hot = rng.choices(range(HOT_PREFIXES), popularity)[0] << 24
        own = tokens // BLOCK_TOKENS - shared
        blocks = (*range(hot, hot + shared), *range(fresh, fresh + max(0, own))) if load.prefix_reuse else ()
        fresh += max(0, own)
        requests.append(Request(arrival_s=at, prompt_tokens=tokens, output_tokens=max(1, round(output)), blocks=blocks))
    return requests


def _sessions(load: Description, rng: random.Random) -> list[Request]:
    """Sessions whose prompts grow by a constant factor, so that each turn's history is the described share of it."""
    count = -(-load.sample // load.turns)
    # the first turn of a session can reuse nothing, so the later ones reuse more than the average
    reuse = min(0.98, max(load.prefix_reuse, 1e-6))
    growth = _growth(reuse, load.turns)
    sizes = [growth**turn for turn in range(load.turns)]
    bases = _lognormal(rng, count, load.prompt_tokens * load.turns / math.fsum(sizes), load.prompt_cv)
    outputs = _lognormal(rng, count * load.turns, load.output_tokens, load.output_cv)
    starts = _arrivals(rng, count, load.arrival_cv)
    gap = THINK_S * load.rate_rps / load.turns  # in units of the sessions' mean gap, which the rate scales later
    requests = []
    for session, (start, base) in enumerate(zip(starts, bases, strict=True)):
        at = start
        for turn, size in enumerate(sizes):
            tokens = max(1, round(base * size))
            first = session << 24
            requests.append(
                Request(
                    arrival_s=at,
                    prompt_tokens=tokens,
                    output_tokens=max(1, round(outputs[session * load.turns + turn])),
                    blocks=tuple(range(first, first + tokens // BLOCK_TOKENS)),
                    session=str(session),
                )
            )
            at += rng.expovariate(1 / gap)
    return requests


def _growth(reuse: float, turns: int) -> float:
    """The growth per turn at which a session's later prompts share `reuse` of all its prompt tokens.

    Shared tokens are the sum of all turns but the last, total tokens the sum of all: bisection on their ratio.
    """
    low, high = 1.0, 1e6
    for _ in range(80):
        growth = math.sqrt(low * high)
        sizes = [growth**turn for turn in range(turns)]
        shared = math.fsum(sizes[:-1]) / math.fsum(sizes)
        low, high = (growth, high) if shared > reuse else (low, growth)
    return high
