"""The loads of `python -m benches.scheduler_bars`: each a function of a seed, none longer than half a simulated hour.

Traces are the public ones that ship with the planner (sources and licences: `pdgate/plan/data/README.md`). Another seed
is another stretch of the trace or another draw. Development seeds are below 100, reported ones from 100 on.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec

import pdgate.plan
from contracts.lifecycle import HandOff
from contracts.slo import SloTarget
from scheduler.policy.queueing import Split
from scheduler.simulator.arrivals import Arrival, Lengths, Workload, merged, overlaid, poisson, regimes
from scheduler.simulator.traces import read_trace

TRACES = Path(pdgate.plan.__file__).with_name("data")
TARGET = SloTarget(ttft_ms=2000, tpot_ms=20)
WORKERS = 8

Load = Callable[[int], list[Arrival]]


@functools.cache
def _trace(name: str) -> tuple[Arrival, ...]:
    return tuple(read_trace(TRACES / name))


def _of_trace(name: str, copies: int, length_s: float = 1500.0) -> Load:
    return lambda seed: overlaid(_trace(name), copies=copies, length_s=length_s, seed=seed)


PROMPTS = Workload(
    name="long prompts, short answers",
    prompt=Lengths(median=5000, p90_over_median=2.2, highest=30_000),
    output=Lengths(median=120, p90_over_median=2.0, highest=1000),
    rate_rps=27.0,
)
ANSWERS = Workload(
    name="short prompts, long answers",
    prompt=Lengths(median=550, p90_over_median=2.0, highest=8000),
    output=Lengths(median=1800, p90_over_median=1.5, highest=4000),
    rate_rps=20.0,
)
SHORT = Workload(
    name="short", prompt=Lengths(median=250, p90_over_median=1.6), output=Lengths(median=250, p90_over_median=2.0),
    rate_rps=18.0,
)  # fmt: skip
LONG = msgspec.structs.replace(SHORT, name="long", prompt=Lengths(median=7000, p90_over_median=1.6, highest=30_000))
CHAT = Workload(
    name="chat", prompt=Lengths(median=1200, p90_over_median=2.0), output=Lengths(median=220, p90_over_median=2.0),
    rate_rps=16.0,
)  # fmt: skip
BATCH = Workload(
    name="batch", tier="batch", tenant="batch", prompt=Lengths(median=400, p90_over_median=2.0),
    output=Lengths(median=60, p90_over_median=1.5), rate_rps=1.0, shared_prefixes=400, prefix_tokens=6144,
)  # fmt: skip


_LONGER = Lengths(median=3000, p90_over_median=2.0)


def _alternating(period_s: float, length_s: float) -> Load:
    return lambda seed: list(regimes((PROMPTS, ANSWERS), period_s=period_s, duration_s=length_s, seed=seed))


def _halves(seed: int) -> list[Arrival]:
    return list(merged(poisson(SHORT, duration_s=480, seed=2 * seed), poisson(LONG, duration_s=480, seed=2 * seed + 1)))


def _beside_batch(seed: int) -> list[Arrival]:
    """Return chat, and more batch lines than can be served, all there from the beginning."""
    lines = poisson(msgspec.structs.replace(BATCH, rate_rps=400.0), duration_s=30, seed=2 * seed)
    return list(merged(poisson(CHAT, duration_s=300, seed=2 * seed + 1), lines))


def _two_tenants(seed: int) -> list[Arrival]:
    """Return a tenant at its rate, and one that sends ten times as much: more than the pool can serve."""
    quiet = msgspec.structs.replace(CHAT, tenant="quiet", prompt=_LONGER, rate_rps=7.0)
    loud = msgspec.structs.replace(CHAT, tenant="loud", prompt=_LONGER, rate_rps=70.0)
    return list(merged(poisson(quiet, duration_s=300, seed=2 * seed), poisson(loud, duration_s=300, seed=2 * seed + 1)))


def quiet_alone(seed: int) -> list[Arrival]:
    """Return the quiet tenant of the row of two, by itself."""
    return [arrival for arrival in _two_tenants(seed) if arrival.tenant == "quiet"]


def of_regime(name: str, length_s: float = 300.0) -> Load:
    """Return the load of one regime alone: what the oracle of the regimes is searched on."""
    workload = next(w for w in (PROMPTS, ANSWERS) if w.name == name)
    return lambda seed: list(poisson(workload, duration_s=length_s, seed=seed * 31 + 7))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the bars: a load, where the policy begins, and what is compared."""

    name: str
    load: Load
    hand_off: HandOff = HandOff.DIRECT
    first: Split | None = None
    """Where the policy begins; None = its own first split."""
    regimes: bool = False
    rivals: bool = True
    plain: bool = False
    """Whether static splits with the plain placement (least loaded, in order of arrival) are searched, too."""
    dissolved: bool = False
    """Whether a pool that turns all-unified from its first second on is played, too."""


_CONVERSATION = _of_trace("conversation_trace.jsonl.xz", 2)

ROWS = (
    Row(name="conversation", load=_CONVERSATION),
    Row(name="azure-conv", load=_of_trace("AzureLLMInferenceTrace_conv.csv.xz", 22, 300.0)),
    Row(name="azure-code", load=_of_trace("AzureLLMInferenceTrace_code.csv.xz", 26, 480.0)),
    Row(name="wrong-start-direct", load=_CONVERSATION, first=Split(prefill=2, decode=6)),
    Row(name="wrong-start-store", load=_CONVERSATION, first=Split(prefill=2, decode=6), hand_off=HandOff.STORE),
    Row(name="halves", load=_halves, plain=True),
    Row(name="regimes-600", load=_alternating(600.0, 1200.0), regimes=True),
    Row(name="regimes-300", load=_alternating(300.0, 1200.0), regimes=True),
    Row(name="regimes-60-direct", load=_alternating(60.0, 1800.0), dissolved=True),
    Row(name="regimes-60-store", load=_alternating(60.0, 600.0), hand_off=HandOff.STORE),
    Row(name="batch", load=_beside_batch, rivals=False),
    Row(name="tenants", load=_two_tenants, rivals=False),
)
