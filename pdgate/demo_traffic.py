"""A week of believable traffic: requests on a virtual clock, served by the policy that production runs. Pure.

1. Two applications with the habits of a working week: a chat assistant whose prompts share their system prompts, and
   a search that asks with long passages. Three noons have a rush; in one of them a decode worker dies.
2. `scheduler.simulator` places them on three workers whose costs are those of a timed engine (contracts.perf).
3. Every request becomes the usage event and the workers' records that such a request leaves behind.

The same seed and end give the same requests with the same ids, so playing them again charges nothing twice.
"""

import math
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from contracts.demo import DEMO_WEEK_ORG
from contracts.lifecycle import HandOff, Path, Phase
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.rating import Price, Tokens, cost
from contracts.slo import SloTarget, Timings, met
from contracts.units import Nano
from contracts.usage import AttemptRecord, Outcome, UsageEvent
from scheduler.policy.queueing import Split
from scheduler.simulator.arrivals import Arrival, Lengths, Workload
from scheduler.simulator.job import Job
from scheduler.simulator.pilot import StaticPilot
from scheduler.simulator.setup import Failure, Setup
from scheduler.simulator.simulation import Simulation

WEEK_S: Final = 7 * 86_400
KEYS: Final[Mapping[str, Sequence[str]]] = {"Assistant": ("web", "mobile"), "Search": ("answers", "nightly-index")}
"""Keys of each project."""
COSTS: Final = LatencyModel(
    prefill=PrefillCost(fixed_ms=35.0, per_token_ms=0.4, per_token_pair_ms=2e-5),
    decode=DecodeCost(fixed_ms=22.0, per_request_ms=1.5, per_kv_token_ms=3e-4),
    transfer=TransferCost(fixed_ms=3.0, bytes_per_ms=1.2e6, kv_bytes_per_token=23_040),
    kv_capacity_tokens=60_000,
    max_running=16,
)
"""Of one worker: a small model on a modest accelerator."""
_SPLIT: Final = Split(prefill=1, decode=2)
_HOUR_S: Final = 3_600
_LEFT_SHARE: Final = 0.025  # of clients that do not wait for the end
_RUSHES: Final = ((1, 180.0), (2, 330.0), (5, 150.0))  # days from the start, times the usual rate of that noon
_RUSH_S: Final = 240


class DemoKey(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks: a key of the demo organisation."""

    project: str  # id
    key_id: str


class Week(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be played. `end_unix_ms` is the newest moment; times of requests are before it."""

    end_unix_ms: int
    model: str
    pool: str
    price: Price
    target: SloTarget
    context_tokens: int
    owners: Mapping[str, DemoKey]  # by key name
    seed: int = 7
    share: float = 1.0
    """Of the usual number of requests."""


class Played(msgspec.Struct, frozen=True):
    """One request: what the gateway settled, and what the workers counted."""

    event: UsageEvent
    records: Sequence[AttemptRecord]


def played(week: Week) -> list[Played]:
    """Return the week's requests, the oldest first."""
    start_ms = week.end_unix_ms - WEEK_S * 1000
    arrivals = _arrivals(week, start_ms)
    broken_s = float(_noon(start_ms, _RUSHES[1][0]) * _HOUR_S + 700)
    setup = Setup(
        split=_SPLIT,
        target=week.target,
        latency=COSTS,
        deadline_s=60.0,
        sample_s=float(_HOUR_S),
        failures=(Failure(at_s=broken_s, worker_id="w1", down_s=120.0),),
        seed=week.seed,
    )
    pilot = StaticPilot()
    pilot.period_s = float(_HOUR_S)  # it never moves a worker
    simulation = Simulation(setup, pilot)
    simulation.run(arrivals)
    chance = random.Random(week.seed)  # noqa: S311 - believable, not secret
    names = {worker_id: f"{worker.role.value}-{worker_id[1:]}" for worker_id, worker in simulation.workers.items()}
    jobs = sorted(simulation.jobs.values(), key=lambda job: job.number)
    return [_request(week, start_ms, job, names, chance) for job in jobs]


# -- what arrives --------------------------------------------------------------------------------------


def _arrivals(week: Week, start_ms: int) -> Sequence[Arrival]:
    longest = max(256, week.context_tokens - 1_200)
    assistant = Workload(
        prompt=Lengths(median=180, p90_over_median=3.0, lowest=12, highest=longest // 2),
        output=Lengths(median=110, p90_over_median=2.6, lowest=2, highest=900),
        rate_rps=0.0055 * week.share, max_tokens=900, shared_prefixes=3, prefix_tokens=512,
    )  # fmt: skip
    search = Workload(
        prompt=Lengths(median=950, p90_over_median=2.2, lowest=200, highest=longest - 512),
        output=Lengths(median=60, p90_over_median=2.0, lowest=4, highest=300),
        rate_rps=0.0028 * week.share, max_tokens=300, shared_prefixes=12, prefix_tokens=512,
    )  # fmt: skip
    chance = random.Random(f"{week.seed} arrivals")  # noqa: S311
    rushes, found = {_noon(start_ms, day): times for day, times in _RUSHES}, list[Arrival]()
    for workload, project, night in ((assistant, "Assistant", 0.08), (search, "Search", 0.5)):
        found += _of_one(workload, KEYS[project], night, start_ms, rushes, chance)
    return sorted(found, key=lambda arrival: arrival.at_s)


def _of_one(
    workload: Workload,
    keys: Sequence[str],
    night: float,
    start_ms: int,
    rushes: Mapping[int, float],
    chance: random.Random,
) -> Iterator[Arrival]:
    """Yield one application's requests: each hour has its rate; a rush lasts four minutes."""
    for hour in range(WEEK_S // _HOUR_S):
        rate = workload.rate_rps * _busy(start_ms + hour * _HOUR_S * 1000, night)
        parts = [(hour * _HOUR_S, _HOUR_S, rate)]
        if hour in rushes:
            parts.append((hour * _HOUR_S + 600, _RUSH_S, rate * rushes[hour]))
        for from_s, length_s, rps in parts:
            at_s = from_s + chance.expovariate(rps)
            while at_s < from_s + length_s:
                one = workload.one(at_s, chance, int(at_s * 10))
                yield msgspec.structs.replace(one, tenant=keys[0] if chance.random() < 0.7 else keys[1])
                at_s += chance.expovariate(rps)


def _busy(at_ms: int, night: float) -> float:
    """Return how busy an hour is: 1 at three in the afternoon of a working day, `night` at three at night (UTC)."""
    hour, day = at_ms // 3_600_000 % 24, (at_ms // 86_400_000 + 3) % 7  # 1970-01-01 was a Thursday
    day_share = (1 - math.cos((hour - 3) / 24 * 2 * math.pi)) / 2
    return (night + (1 - night) * day_share) * (0.45 if day >= 5 else 1.0)


def _noon(start_ms: int, day: int) -> int:
    """Return the hour of the week, from its start, that is noon (UTC) of a day."""
    return 24 * day + (12 - start_ms // 3_600_000 % 24) % 24


# -- what it leaves behind ---------------------------------------------------------------------------------


def _request(week: Week, start_ms: int, job: Job, names: Mapping[str, str], chance: random.Random) -> Played:
    arrival = job.arrival
    at_ms = start_ms + int(arrival.at_s * 1000)
    rid = _rid(at_ms, chance)
    who = week.owners[arrival.tenant]
    outcome, cause = Outcome.FINISHED, ""
    if not job.done:
        outcome, cause = (Outcome.REFUSED, "no_capacity") if job.refused else (Outcome.INTERRUPTED, "worker_lost")
    made = arrival.output_tokens if job.done else 0
    if job.done and made > 20 and chance.random() < _LEFT_SHARE:
        outcome, made = Outcome.CLIENT_LEFT, int(made * chance.uniform(0.1, 0.9))
    ran = job.placed_ms >= 0 and not job.refused
    computed = arrival.prompt_tokens - job.cached_tokens
    tokens = Tokens(prefill_computed=computed, prefill_cached=job.cached_tokens, decode=made) if ran else Tokens()
    seen = _timings(job, made) if job.done else None
    price = cost(tokens, week.price) if outcome.billable else Nano(0)
    pair = bool(job.prefill_id)
    event = UsageEvent(
        rid=rid,
        org=DEMO_WEEK_ORG,
        project=who.project,
        key_id=who.key_id,
        model=week.model,
        pool=week.pool,
        tier="default",
        outcome=outcome,
        cause=cause,
        finish_reason=_finish(job, made) if outcome is Outcome.FINISHED else "",
        tokens=tokens,
        price=week.price,
        cost=price,
        path=(Path.PD if pair else Path.UNIFIED) if ran else None,
        hand_off=HandOff.DIRECT if ran and pair else None,
        attempts=job.attempt,
        stream=chance.random() < 0.8,
        prefill_worker=names.get(job.prefill_id or job.decode_id, ""),
        decode_worker=names.get(job.decode_id, ""),
        timings=seen,
        slo_met=met(seen, week.target) if seen is not None else (None if outcome is Outcome.REFUSED else False),
        simulated=True,
    )
    return Played(event, _records(event, job, names, at_ms) if job.done else ())


def _timings(job: Job, made: int) -> Timings:
    decode_ms = job.tpot_ms * max(0, made - 1)
    return Timings(
        ttft_ms=job.ttft_ms,
        decode_ms=decode_ms,
        decode_tokens=made,
        queue_ms=max(0.0, job.placed_ms - job.arrived_ms),
        prefill_ms=max(0.0, job.prefill_end_ms - job.placed_ms),
        transfer_ms=max(0.0, job.kv_arrived_ms - job.prefill_end_ms) if job.prefill_id else 0.0,
        total_ms=job.ttft_ms + decode_ms,
    )


def _records(event: UsageEvent, job: Job, names: Mapping[str, str], at_ms: int) -> Sequence[AttemptRecord]:
    assert event.timings is not None
    ended_ms = at_ms + int(event.timings.total_ms)
    compute_ms = max(0.0, job.prefill_end_ms - job.prefill_start_ms)
    shared_ms = event.timings.decode_ms / 4  # a step is shared by all that run beside

    def record(phase: Phase, worker_id: str, completion_tokens: int, ms: float) -> AttemptRecord:
        return AttemptRecord(
            rid=event.rid,
            attempt=event.attempts,
            sample=0,
            phase=phase.value,
            worker_id=names[worker_id],
            worker_epoch=1,
            pool=event.pool,
            reason=event.finish_reason or "abort",
            prompt_tokens=event.tokens.prompt,
            cached_tokens=event.tokens.prefill_cached,
            completion_tokens=completion_tokens,
            compute_ms=ms,
            ended_unix_ms=ended_ms,
            worker_ms=event.timings.total_ms if event.timings else 0.0,
        )

    if not job.prefill_id:
        return (record(Phase.UNIFIED, job.decode_id, event.tokens.decode, compute_ms + shared_ms),)
    return (
        record(Phase.PREFILL, job.prefill_id, 0, compute_ms),
        record(Phase.DECODE, job.decode_id, event.tokens.decode, shared_ms),
    )


def _finish(job: Job, made: int) -> str:
    return "length" if made >= job.arrival.max_tokens else "stop"


def _rid(at_ms: int, chance: random.Random) -> str:
    """Return a UUIDv7 of that time whose other bits come from `chance` (contracts.identity makes secret ones)."""
    bits = at_ms << 80 | 0x7 << 76 | chance.getrandbits(12) << 64 | 0b10 << 62 | chance.getrandbits(62)
    return str(uuid.UUID(int=bits))
