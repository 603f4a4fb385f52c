"""The decision's fleets played by the simulator under the production policy, beside the closed form.

Both see the same first requests of the traffic. The closed form queues first come, first served; the production policy
orders by deadline and lets late requests give way, so it keeps the targets somewhat longer near its limit.
"""

import math
from collections.abc import Callable

import msgspec

from contracts.lifecycle import HandOff
from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from pdgate.plan.decide import WORTH, Choice
from pdgate.plan.fleet import Setting
from pdgate.plan.options import capacity_rps, load_of
from pdgate.plan.shapes import Kind, Shape
from pdgate.plan.traffic import Traffics
from pdgate.plan.workload import Workload
from scheduler.policy.queueing import Split
from scheduler.simulator.arrivals import BLOCK_TOKENS, Arrival
from scheduler.simulator.engine import EngineTraits
from scheduler.simulator.play import Policy, play
from scheduler.simulator.setup import Setup

SAMPLE, MOST, SPAN_S = 1500, 6000, 60.0  # requests played: at least, at most, and else as many seconds
BISECTIONS = 4
CLOSE = 0.05  # attainments this near agree
OVERLOADED = 0.02  # attainment below which the closed form says that queues grow without end
ENDLESS = "beyond its capacity a queue grows without end in closed form; the requests played only begin it"
ORDERED = "near its limit a fleet does better under deadline order than first come, first served"
MIXED_STEP = 0.9  # share of the TPOT target that a mixed step aims at


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet at the planned rate."""

    workers: str
    closed_form: float  # attainment, 0 to 1
    simulated: float  # the same, refused requests missed


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """What closed form and simulation say of the same requests."""

    requests: int
    fleets: list[Played]
    gain_closed_form: float | None  # None = no two fleets to compare
    gain_simulated: float | None
    agree: bool
    why: str  # why not, or why it was not played; empty if they agree


def agreement_of(
    workload: Workload, setting: Setting, choice: Choice, progress: Callable[[str], None] = lambda _: None
) -> Agreement:
    """Return both answers for the best unified fleet, the best split and, if it is neither, the chosen fleet."""
    count = round(min(MOST, max(SAMPLE, workload.rate_rps * SPAN_S)))
    first = msgspec.structs.replace(workload, requests=workload.requests[:count]).at_rate(workload.rate_rps)
    count = len(first.requests)
    if setting.target.ttft_ms is None and setting.target.tpot_ms is None:
        return _unplayed(count, "work without targets has no attainment to compare")
    if any(r.cached_tokens is not None for r in first.requests):
        return _unplayed(count, "the log has cached tokens but no prefixes, which the simulated caches need")
    if BLOCK_TOKENS % first.block_tokens:
        return _unplayed(count, f"prefix blocks of {first.block_tokens} tokens do not make up {BLOCK_TOKENS}")
    traffics = Traffics(first, setting.target)
    setting = msgspec.structs.replace(setting, moments=traffics.moments)
    shapes: dict[str, Shape] = {}
    for shape in (choice.unified and choice.unified[0], choice.split and choice.split[0], choice.shape):
        if shape is not None and (why := _unplayable(shape)):
            return _unplayed(count, why)
        if shape is not None:
            shapes[shape.text()] = shape
    if not shapes:
        return _unplayed(count, "no fleet keeps the targets")
    fleets = []
    for text, shape in shapes.items():
        progress(f"simulating: {text}")
        closed = load_of(shape, first.rate_rps, traffics, setting).attainment
        fleets.append(
            Played(
                workers=text, closed_form=closed, simulated=simulated_attainment(shape, first, first.rate_rps, setting)
            )
        )
    closed_gain = simulated_gain = None
    if choice.unified and choice.split:
        pair = choice.unified[0], choice.split[0]
        closed_gain = _gain(*(capacity_rps(s, traffics, setting) for s in pair))
        progress("simulating: capacities")
        simulated_gain = _gain(*(simulated_rps(s, first, traffics, setting) for s in pair))
    why = _difference(fleets, setting.attainment, closed_gain, simulated_gain)
    return Agreement(
        requests=count,
        fleets=fleets,
        gain_closed_form=closed_gain,
        gain_simulated=simulated_gain,
        agree=not why,
        why=why,
    )


def simulated_rps(shape: Shape, workload: Workload, traffics: Traffics, setting: Setting) -> float:
    """Return the highest rate at which the simulated fleet keeps the attainment, within 4 %.

    Searched between two thirds and 1.8 times the closed form's; at an end the end is returned.
    """
    centre = capacity_rps(shape, traffics, setting) or workload.rate_rps
    low, high = centre / 1.5, centre * 1.8
    for _ in range(BISECTIONS):
        rate = math.sqrt(low * high)
        kept = simulated_attainment(shape, workload, rate, setting) >= setting.attainment
        low, high = (rate, high) if kept else (low, rate)
    return math.sqrt(low * high)


def simulated_attainment(shape: Shape, workload: Workload, rate_rps: float, setting: Setting) -> float:
    """Return the share (0 to 1) of all requests that meet both targets when the shape is played at a rate."""
    latency = _latency(shape)
    target = setting.target
    # the front latency is outside the simulated engine, so the engine has that much less time
    ttft_ms = None if target.ttft_ms is None else max(1.0, target.ttft_ms - latency.front_ms)
    step_ms = MIXED_STEP * target.tpot_ms if target.tpot_ms is not None else EngineTraits().mixed_step_ms
    setup = Setup(
        split=Split(prefill=shape.prefill, decode=shape.decode, unified=_unified(shape)),
        target=SloTarget(ttft_ms=ttft_ms, tpot_ms=target.tpot_ms),
        latency=latency,
        hand_off=HandOff.STORE if shape.kind is Kind.STORE else HandOff.DIRECT,
        traits=EngineTraits(mixed_step_ms=step_ms, mixing_cost=setting.mixing),
    )
    # of the smaller blocks that make up a simulated one, the last names the prefix up to its end
    every = max(1, BLOCK_TOKENS // workload.block_tokens)
    arrivals = [
        Arrival(
            at_s=r.arrival_s,
            prompt_tokens=r.prompt_tokens,
            output_tokens=r.output_tokens,
            blocks=r.blocks[every - 1 :: every],
        )
        for r in workload.at_rate(rate_rps).requests
    ]
    result, _ = play(arrivals, setup, Policy.UNIFIED if shape.kind is Kind.UNIFIED else Policy.STATIC)
    return min(1.0, result.goodput_rps * result.duration_s / len(arrivals))


def _latency(shape: Shape) -> LatencyModel:
    """Prefill and hand-off as the prefill workers do them, decode and memory as the decode workers."""
    prefill = shape.prefill_worker or shape.unified_worker
    decode = shape.decode_worker or shape.unified_worker
    assert prefill is not None
    assert decode is not None
    first = prefill.latency
    return msgspec.structs.replace(
        decode.latency, prefill=first.prefill, transfer=first.transfer, front_ms=first.front_ms
    )


def _unified(shape: Shape) -> int:
    """Unified workers that can be played: a standby of another kind than the decode workers is left out."""
    if shape.kind is Kind.UNIFIED or shape.unified_worker == shape.decode_worker:
        return shape.unified
    return 0


def _unplayable(shape: Shape) -> str:
    if shape.kind is Kind.MIXED and shape.unified_worker != shape.decode_worker:
        return "the simulator plays one kind of worker; this mix has unified and decode workers of different kinds"
    return ""


def _unplayed(requests: int, why: str) -> Agreement:
    return Agreement(requests=requests, fleets=[], gain_closed_form=None, gain_simulated=None, agree=False, why=why)


def _gain(unified_rps: float, split_rps: float) -> float | None:
    return split_rps / unified_rps - 1 if unified_rps > 0 else None


def _difference(fleets: list[Played], wanted: float, closed: float | None, simulated: float | None) -> str:
    """Why the two differ; empty if they agree."""
    apart = [
        f"{f.workers}: {f.closed_form:.0%} in closed form, {f.simulated:.0%} simulated"
        for f in fleets
        if abs(f.closed_form - f.simulated) > CLOSE and not min(f.closed_form, f.simulated) >= wanted
    ]
    parts = []
    if apart:
        full = all(f.closed_form < OVERLOADED for f in fleets if abs(f.closed_form - f.simulated) > CLOSE)
        parts.append("; ".join(apart) + f" ({ENDLESS if full else ORDERED})")
    if closed is not None and simulated is not None and (closed >= WORTH) != (simulated >= WORTH):
        parts.append(
            f"the gain of a split is {closed:+.0%} in closed form and {simulated:+.0%} simulated, on different sides "
            f"of {WORTH:.0%}: measure before you decide"
        )
    return "; ".join(parts)
