"""Predicted goodput of a split of workers into prefill, decode and unified: closed forms. Pure.

Prefill: M/G/c with the tail of Allen and Cunneen. P(wait > x) = C * exp(-2x * c * (1 - rho) / (E[S] * v)),
C = Erlang C, v = C_a^2 + C_s^2; and, since real bursts outlast what v can say, the seconds that were seen,
played again as a fluid through the servers. The lower of the two counts.
Decode: an infinite server whose KV tokens in use are nearly normal with mean lambda*t*E[n*O + O^2/2]; a worker
has room up to its memory, or up to the K at which a step reaches the TPOT target.
Unified: decode as above, and prompts in what a step at the target leaves.
Overload: what is served in time is the capacity's share, since requests that cannot be in time give way.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import msgspec

from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from scheduler.policy.bursts import in_time_of_course
from scheduler.policy.demand import Demand


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Ready workers by role."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.unified

    def __str__(self) -> str:
        """`4P3D1U`."""
        return f"{self.prefill}P{self.decode}D{self.unified}U"


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What workers cost and promise: the fixed part of a prediction."""

    latency: LatencyModel
    target: SloTarget
    mixing_cost: float = 1.1
    headroom: float = 0.95
    """Share of the TPOT target and of the KV memory that is planned with."""

    @property
    def planned_step_ms(self) -> float:
        """The decode step that is planned for; without a TPOT target, the one with memory full."""
        if self.target.tpot_ms is not None:
            return self.target.tpot_ms * self.headroom
        return max(1e-6, self.latency.decode.step_ms(32, self.latency.kv_capacity_tokens))


class Corrections(msgspec.Struct, frozen=True, kw_only=True):
    """What feedback says about the model: loads are multiplied by these, and the backlog comes on top."""

    prefill: float = 1.0
    decode: float = 1.0
    backlog_rps: float = 0.0
    """Waiting requests that can still be in time, over the time in which they should be gone."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a split would do."""

    goodput_rps: float
    unified_share: float
    """Share of requests that run on unified workers, 0.0 to 1.0."""
    prefill_load: float
    """Busy share of the prefill workers; above 1.0 the backlog grows."""
    decode_load: float
    """KV tokens in use over those planned with, on decode workers."""
    prefill_missed: float = 0.0
    """Share (0 to 1) of the feasible requests whose prompt is late."""
    decode_missed: float = 0.0
    """Share (0 to 1) of them that find no room to decode in time."""


NOTHING = Prediction(goodput_rps=0.0, unified_share=0.0, prefill_load=0.0, decode_load=0.0)
_ALMOST_FULL = 0.95
_PARTS = (0.25, 0.5, 0.75)
_NORMAL = (-1.6449, -1.0364, -0.6745, -0.3853, -0.1257, 0.1257, 0.3853, 0.6745, 1.0364, 1.6449)  # deciles' middles


class _Part(msgspec.Struct, frozen=True):
    """Some of the requests: a share of all, the feasible ones from one quantile of prompt length to another."""

    name: int
    """Which of the parts tried this is: sides are remembered by it."""
    share: float
    first: int
    last: int
    impossible: bool
    """Whether the infeasible ones are among them."""


class _Cut(msgspec.Struct, frozen=True):
    """Who goes to the pairs and who to the unified workers."""

    pairs: _Part
    unified: _Part


@functools.cache
def _cuts(quantiles: int) -> Sequence[_Cut]:
    """Return every way to divide requests that is tried: a sample of all of them, or the shortest prompts."""
    names = itertools.count()

    def part(share: float, first: int, last: int, *, impossible: bool) -> _Part:
        return _Part(next(names), share, first, last, impossible)

    none = part(0.0, 0, 0, impossible=False)
    everything = part(1.0, 0, quantiles, impossible=True)
    cuts = [_Cut(everything, none), _Cut(none, everything)]
    cuts.extend(
        _Cut(part(1 - share, 0, quantiles, impossible=True), part(share, 0, quantiles, impossible=True))
        for share in (0.125, 0.25, 0.4, 0.6, 0.8)
    )
    for last in range(1, quantiles):
        share = last / quantiles
        cuts.append(_Cut(part(1 - share, last, quantiles, impossible=True), part(share, 0, last, impossible=False)))
    return cuts


class Predictor:
    """Predicts splits under one demand. Each side is computed once, however many splits share it."""

    def __init__(self, demand: Demand, fleet: Fleet, corrections: Corrections) -> None:
        self._demand = demand
        self._fleet = fleet
        self._corrections = corrections
        self._rate_rps = demand.rate_rps + corrections.backlog_rps  # what has to be served
        self._cuts = _cuts(len(demand.prefill_ms_quantiles))
        self._needs = _kv_needs(demand)
        self._bursts: dict[float, float] = {}
        self._prefill: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._decode: dict[tuple[int, int], tuple[float, float]] = {}
        self._unified: dict[tuple[int, int], tuple[float, float, float, float]] = {}

    def predict(self, split: Split) -> Prediction:
        """Return the goodput of a split, with the best division of requests between its paths."""
        if self._demand.rate_rps <= 0:
            return NOTHING
        pairs = split.prefill > 0 and split.decode > 0
        best, most_met = NOTHING, -1.0
        for cut in self._cuts:
            if (cut.pairs.share and not pairs) or (cut.unified.share and not split.unified):
                continue
            met = prefill_load = decode_load = late = 0.0
            if cut.pairs.share:
                prefill_load, feasible_load, in_time = self._prefill_side(split.prefill, cut.pairs)
                # What is costlier to tell is asked only where another division has not won already.
                if cut.pairs.share * in_time + cut.unified.share <= most_met:
                    continue
                in_time = min(in_time, self._through_bursts(cut.pairs, feasible_load, 1.0))
                if cut.pairs.share * in_time + cut.unified.share <= most_met:
                    continue
                decode_load, room = self._decode_side(split.decode, cut.pairs)
                met += cut.pairs.share * in_time * room
                late += cut.pairs.share * (1 - in_time)
            if cut.unified.share:
                stretch, feasible_load, in_time, room = self._unified_side(split.unified, cut.unified)
                if met + cut.unified.share * in_time * room <= most_met:
                    continue
                in_time = min(in_time, self._through_bursts(cut.unified, feasible_load, stretch))
                met += cut.unified.share * in_time * room
                late += cut.unified.share * (1 - in_time)
            if met > most_met:
                most_met = met
                best = Prediction(
                    goodput_rps=met * self._demand.rate_rps * self._demand.feasible_share,
                    unified_share=cut.unified.share,
                    prefill_load=prefill_load,
                    decode_load=decode_load,
                    prefill_missed=late,
                    decode_missed=1 - late - met,
                )
        return best

    def _prefill_side(self, workers: int, part: _Part) -> tuple[float, float, float]:
        """Return the load, that of feasible prompts, and their share in time as far as queueing tells."""
        got = self._prefill.get((workers, part.name))
        if got is None:
            demand, fleet = self._demand, self._fleet
            load, feasible_load = self._loads(part, workers, 1.0)
            in_time = prefill_in_time(
                demand.prefill_ms_quantiles[part.first : part.last],
                load=load,
                feasible_load=feasible_load,
                servers=workers,
                spread_ms=demand.prefill_ms * demand.dispersion,
                ttft_ms=fleet.target.ttft_ms,
                besides_ms=fleet.latency.transfer.ms(int(demand.prompt_tokens)),
            )
            got = self._prefill[workers, part.name] = (load, feasible_load, in_time)
        return got

    def _through_bursts(self, part: _Part, feasible_load: float, stretch: float) -> float:
        """Return the share (0 to 1) of a part's prompts that the seconds seen would have let in time."""
        demand, ttft_ms = self._demand, self._fleet.target.ttft_ms
        mean_load = demand.rate_rps * demand.feasible_share * demand.feasible_prefill_ms / 1000
        if ttft_ms is None or mean_load <= 0 or feasible_load <= 0 or part.last <= part.first:
            return 1.0
        servers = round(mean_load / feasible_load, 2)  # that the whole of the feasible work would need
        got = self._bursts.get(servers)
        if got is None:
            own_ms = demand.prefill_ms_quantiles[part.first : part.last]
            own_ms = tuple(stretch * ms for ms in own_ms)
            slack_ms = ttft_ms - sum(own_ms) / len(own_ms)
            got = in_time_of_course(demand.course, servers=servers, slack_ms=slack_ms, own_ms=own_ms)
            self._bursts[servers] = got
        return got

    def _loads(self, part: _Part, workers: int, stretch: float) -> tuple[float, float]:
        """Return the busy share of workers that compute the prompts of a part: all of them, feasible ones."""
        demand = self._demand
        quantiles = demand.prefill_ms_quantiles
        scale = self._corrections.prefill * self._rate_rps * stretch / 1000 / workers
        if not quantiles:
            return scale * part.share * demand.prefill_ms, 0.0
        every_ms = sum(quantiles) / len(quantiles)
        if every_ms <= 0:
            return 0.0, 0.0
        of_part_ms = sum(quantiles[part.first : part.last]) / (part.last - part.first)
        feasible_ms = demand.feasible_share * demand.feasible_prefill_ms
        feasible = scale * part.share * feasible_ms * of_part_ms / every_ms
        impossible_ms = max(0.0, demand.prefill_ms - feasible_ms)
        whole = part.last - part.first == len(quantiles)
        impossible_share = (part.share if whole else 1.0) if part.impossible else 0.0
        return feasible + scale * impossible_share * impossible_ms, feasible

    def _decode_side(self, workers: int, part: _Part) -> tuple[float, float]:
        got = self._decode.get((workers, part.name))
        if got is None:
            rate_rps = part.share * self._corrections.decode * self._rate_rps
            got = decode_room(self._demand, rate_rps=rate_rps, workers=workers, fleet=self._fleet, needs=self._needs)
            self._decode[workers, part.name] = got
        return got

    def _unified_side(self, workers: int, part: _Part) -> tuple[float, float, float, float]:
        """Return how far prompts are stretched, their load, their share in time by queueing, and that with room."""
        got = self._unified.get((workers, part.name))
        if got is None:
            got = self._unified[workers, part.name] = self._unified_met(workers, part)
        return got

    def _unified_met(self, workers: int, part: _Part) -> tuple[float, float, float, float]:
        demand, fleet = self._demand, self._fleet
        rate_rps = part.share * self._rate_rps * self._corrections.decode
        step_ms = fleet.planned_step_ms
        steps = rate_rps * step_ms / 1000 / workers
        decoding_ms = fleet.latency.decode.step_ms(
            int(steps * demand.output_tokens), int(steps * demand.kv_token_steps)
        )
        stretch = fleet.mixing_cost / max(0.02, 1 - decoding_ms / step_ms)
        load, feasible_load = self._loads(part, workers, stretch)
        in_time = prefill_in_time(
            tuple(ms * stretch for ms in demand.prefill_ms_quantiles[part.first : part.last]),
            load=load,
            feasible_load=feasible_load,
            servers=workers,
            spread_ms=demand.prefill_ms * demand.dispersion * stretch,
            ttft_ms=fleet.target.ttft_ms,
            besides_ms=step_ms,
        )
        _, room = decode_room(demand, rate_rps=rate_rps, workers=workers, fleet=fleet, needs=self._needs, paced=True)
        return stretch, feasible_load, in_time, room


def predict(split: Split, demand: Demand, fleet: Fleet, corrections: Corrections) -> Prediction:
    """Return the goodput of one split under a demand."""
    return Predictor(demand, fleet, corrections).predict(split)


def prefill_in_time(
    own_ms: Sequence[float],
    *,
    load: float,
    feasible_load: float,
    servers: int,
    spread_ms: float,
    ttft_ms: float | None,
    besides_ms: float = 0.0,
) -> float:
    """Return the share (0 to 1) of feasible prompts whose wait leaves their TTFT within the target.

    Prompts that cannot be in time give way to those that can, so only feasible work queues before a feasible
    prompt; the rest can still occupy a worker when it arrives. In overload the longest feasible prompts are
    the first that cannot make it: the best number of them to give up is what the order finds by itself.

    Args:
        own_ms: computing times of feasible prompts, at evenly spaced quantiles.
        load: busy share of the servers with everything; above 1.0 is overload.
        feasible_load: the same with feasible prompts only.
        servers: workers that compute prompts.
        spread_ms: mean prompt times dispersion, see Demand.
        ttft_ms: the target; None = any time is in time.
        besides_ms: what TTFT has besides waiting and computing.
    """
    if ttft_ms is None or not own_ms:
        return min(1.0, _ALMOST_FULL / load) if load > 0 else 1.0
    waiting = erlang_c(servers, min(load, _ALMOST_FULL) * servers)
    total_ms = max(sum(own_ms), 1e-9)
    slacks_ms = [ttft_ms - besides_ms - ms for ms in own_ms]
    kept_ms = list(itertools.accumulate(own_ms, initial=0.0))

    def met(kept: int, part: float) -> float:
        """Return how many are in time, in quantiles, if so many are kept and a part of the next one."""
        kept_load = feasible_load * (kept_ms[kept] + (part * own_ms[kept] if part else 0.0)) / total_ms
        if kept_load >= 1:
            return 0.0
        decay_per_ms = 2 * servers * (1 - kept_load) / max(spread_ms, 1e-9)
        parts = [1.0] * kept + ([part] if part else [])
        return sum(
            share * (1 - waiting * math.exp(-slack_ms * decay_per_ms))
            for share, slack_ms in zip(parts, slacks_ms, strict=False)
            if slack_ms > 0
        )

    kept = len(own_ms)
    while kept and feasible_load * kept_ms[kept] >= total_ms:
        kept -= 1
    best, fewer = met(kept, 0.0), met(kept - 1, 0.0) if kept else 0.0
    while fewer > best:  # one quantile after the other, as long as it helps the rest more than it costs
        kept, best = kept - 1, fewer
        fewer = met(kept - 1, 0.0) if kept else 0.0
    beside = [met(kept, part) for part in _PARTS] if kept < len(own_ms) else []
    if kept and best - fewer < _PARTS[-1]:
        beside += [met(kept - 1, part) for part in _PARTS]
    return max(best, *beside, 0.0) / len(own_ms)


def decode_room(
    demand: Demand,
    *,
    rate_rps: float,
    workers: int,
    fleet: Fleet,
    needs: Sequence[float] | None = None,
    paced: bool = False,
) -> tuple[float, float]:
    """Return the load of the KV memory that may be used, and the share of requests that find room in time.

    Args:
        demand: what requests hold, and for how long.
        rate_rps: requests per second for these workers.
        workers: how many.
        fleet: costs and the target.
        needs: what quantiles of the requests ask for, if the caller has it already.
        paced: steps take the planned time, because prompts fill them.
    """
    cost = fleet.latency.decode
    planned_ms = fleet.planned_step_ms
    per_ms = rate_rps / 1000 / workers  # requests per ms and worker
    growth = per_ms * (cost.per_request_ms * demand.output_tokens + cost.per_kv_token_ms * demand.kv_token_steps)
    step_ms = min(planned_ms, cost.fixed_ms / (1 - growth)) if growth < 1 and not paced else planned_ms
    running = per_ms * step_ms * demand.output_tokens
    kv_limit = fleet.latency.kv_capacity_tokens * fleet.headroom
    if cost.per_kv_token_ms > 0:
        within_target = (planned_ms - cost.fixed_ms - cost.per_request_ms * running) / cost.per_kv_token_ms
        kv_limit = min(kv_limit, max(1.0, within_target))
    # Memory is reserved while the prompt is computed elsewhere, and held while it decodes.
    mean = per_ms * (step_ms * demand.kv_token_steps + demand.kv_token_ms_before)
    load = max(mean / kv_limit, growth, running / fleet.latency.max_running)
    # What cannot be in time gives way, and takes only what is left.
    pressing = max(mean * demand.feasible_prompt_share / kv_limit, growth, running / fleet.latency.max_running)
    per_request = demand.kv_token_steps_square * step_ms * per_ms
    held = per_request * (1 + demand.kv_token_ms_before / max(1.0, step_ms * demand.kv_token_steps))
    spread = math.sqrt(max(0.0, held * workers)) / workers / kv_limit
    if pressing + _NORMAL[-1] * spread <= 1.0:
        return load, 1.0
    needs = _kv_needs(demand) if needs is None else needs
    return load, sum(_served(pressing + z * spread, needs) for z in _NORMAL) / len(_NORMAL)


def _kv_needs(demand: Demand) -> Sequence[float]:
    """Return the part of the memory that each quantile of the feasible requests asks for, the least first."""
    every_ms = sum(demand.prefill_ms_quantiles)
    if every_ms <= 0 or demand.prompt_tokens <= 0:
        return ()
    grown = demand.output_tokens / 2
    sizes = [demand.prompt_tokens * len(demand.prefill_ms_quantiles) * ms / every_ms + grown
             for ms in demand.prefill_ms_quantiles]  # fmt: skip
    whole = sum(sizes)
    return [size / whole for size in sizes]


def _served(load: float, needs: Sequence[float]) -> float:
    """Return the share (0 to 1) of requests that find room: in overload the small ones do, as room comes in pieces."""
    if load <= 1.0:
        return 1.0
    room = 1 / load
    if not needs:
        return room
    served = 0.0
    for need in needs:
        if need >= room:
            return (served + room / need) / len(needs)
        room -= need
        served += 1
    return 1.0


def erlang_c(servers: int, offered: float) -> float:
    """Return the probability that an arrival waits, M/M/c. 1.0 when `offered` reaches the servers.

    Args:
        servers: c.
        offered: arrival rate times mean service time, in servers.
    """
    if offered >= servers:
        return 1.0
    if offered <= 0:
        return 0.0
    blocked = 1.0  # Erlang B by its recursion: no factorials to overflow
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    load = offered / servers
    return blocked / (1 - load + load * blocked)
