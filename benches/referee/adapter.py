"""`scheduler.policy.ratio` as a scaling policy of Dynamo's mocker: the third adapter, beside production and simulator.

The mocker calls `on_tick` with a snapshot and applies the counts that come back. Pure: time is in the snapshot.

1. Ticks come each few milliseconds. Requests that have arrived until then are sized up as a gateway's scheduler does;
   requests that have ended teach lengths and are judged; engine passes correct the costs that were measured before.
2. Once a second, as in production, the demand is looked at; each period, or earlier where something has happened,
   `decide` answers on a `Sight`.
3. A move takes a worker out of its role at once. Only when it has drained does the other role get one more, which
   serves after the mocker's own start-up time: workers that drain, start and serve are never more than there were.

What the mocker does not have: unified workers beside pairs (so a restart is priced out of reach), a queue before the
workers (so what waits is counted on them), and a choice of who drains (the worker that came last does).
"""

import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec

from benches.referee.finished import Asked, Underway
from contracts.lifecycle import HandOff, Role
from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from scheduler.policy.blame import BlameWindow, Stamps, blame
from scheduler.policy.demand import DemandWindow, OutputMoments
from scheduler.policy.fairness import TokenWeights
from scheduler.policy.fit import LatencyFit
from scheduler.policy.growing import GrowingAnswers
from scheduler.policy.lengths import LengthKey, LengthModel
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Decision, Mode, Move, decide, is_early
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight
from scheduler.policy.sizing import GENEROUS_QUANTILE, moments, size_up
from scheduler.policy.sizing import Asked as Asking

Snapshot = Mapping[str, Any]
"""What the mocker hands to a scaling policy: counts and ids of workers, engine passes, traffic since the last tick."""

_MODEL, _TENANT, _TIER = "model", "tenant", "default"
_LOOK_S = 1.0
_STATUS_S = 0.1  # a step is measured so often, as workers report
_NEVER_S = 1e9


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of the mocker says of itself when it registers."""

    latency: LatencyModel
    """Its costs, by measured rows (`benches.referee.costs`)."""
    kv_capacity_tokens: int
    max_running: int
    step_tokens: int
    """Prompt tokens that a prefill worker takes in one pass; a longer prompt takes several."""


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """An engine pass, in the words of the mocker's snapshots."""

    worker_id: int
    wall_time: float
    """Seconds."""
    num_prefill_requests: int
    sum_prefill_tokens: int
    sum_prefill_kv_tokens: int
    num_decode_requests: int
    sum_decode_kv_tokens: int
    num_queued_prefill: int
    sum_queued_prefill_tokens: int
    num_queued_decode: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a tick."""

    prefill: int | None
    """Workers wanted, those that drain not counted; None = as they are."""
    decode: int | None
    next_ms: float

    def as_decision(self) -> dict[str, Any]:
        """Return what the mocker takes."""
        return {"target_prefill": self.prefill, "target_decode": self.decode, "next_tick_ms": self.next_ms}


class RatioScaling:
    """Drives the ratio controller over one replay."""

    def __init__(
        self,
        requests: Sequence[Asked],
        *,
        target: SloTarget,
        engine: Engine,
        switch_s: float,
        tick_ms: float | None = None,
    ) -> None:
        self._coming = deque(requests)
        self._target = target
        self._engine = engine
        self._tick_ms = tick_ms or _tick_ms(requests)
        self._limits = limits(switch_s)
        self._fit = LatencyFit(engine.latency, stated=True)
        self._lengths = LengthModel()
        self._growing = GrowingAnswers()
        self._demand = DemandWindow()
        self._blamed = BlameWindow()
        self._passes: dict[tuple[Role, int], Pass] = {}  # the latest of each worker
        self._next_status_s = 0.0
        self._lately: deque[Asked] = deque()  # arrivals that may still be in time
        self._next_look_s = _LOOK_S
        self._next_decision_s = self._limits.period_s
        self._moving_to: Role | None = None
        self.underway = Underway()
        self.state = RatioState()
        self.log: list[tuple[float, Decision]] = []
        self.moves: list[tuple[float, Move]] = []

    # -- what the mocker calls -------------------------------------------------------------------------

    def initial_tick_ms(self) -> float:
        """Return when the first tick is."""
        return self._tick_ms

    def on_tick(self, snapshot: Snapshot) -> dict[str, Any]:
        """Take a snapshot, answer with counts."""
        now_s = snapshot["now_ms"] / 1000
        self._measure(snapshot, now_s)
        self._arrive_until(now_s)
        self._finish(snapshot["traffic"], now_s)
        counts = self._counts(snapshot, now_s)
        return counts.as_decision()

    # -- what is measured ------------------------------------------------------------------------------

    @property
    def latency(self) -> LatencyModel:
        """Costs as believed now, and what the workers said of themselves."""
        return msgspec.structs.replace(
            self._fit.model,
            kv_capacity_tokens=self._engine.kv_capacity_tokens,
            max_running=self._engine.max_running,
        )

    def _measure(self, snapshot: Snapshot, now_s: float) -> None:
        """Take the latest pass of each worker: its load, and what a whole prompt or a step alone took."""
        for row in snapshot["prefill_fpm_snapshots"]:
            seen = self._passed(Role.PREFILL, row)
            alone = seen.num_prefill_requests == 1 and not seen.num_decode_requests
            whole = not seen.sum_prefill_kv_tokens and seen.sum_prefill_tokens < self._engine.step_tokens
            if alone and whole:
                self._fit.prompt(
                    uncached_tokens=seen.sum_prefill_tokens, cached_tokens=0, compute_ms=1000 * seen.wall_time
                )
        if now_s < self._next_status_s:
            return
        self._next_status_s = now_s + _STATUS_S
        for row in snapshot["decode_fpm_snapshots"]:
            seen = self._passed(Role.DECODE, row)
            if not seen.num_prefill_requests:
                self._fit.step(
                    num_requests=seen.num_decode_requests,
                    kv_tokens=seen.sum_decode_kv_tokens,
                    step_ms=1000 * seen.wall_time,
                )

    def _passed(self, role: Role, row: Mapping[str, Any]) -> Pass:
        seen = msgspec.convert(row, Pass)
        self._passes[role, seen.worker_id] = seen
        return seen

    def _arrive_until(self, now_s: float) -> None:
        while self._coming and self._coming[0].at_s <= now_s:
            request = self._coming.popleft()
            self.underway.arrived(request)
            self._lately.append(request)
            latency = self.latency
            asked = Asking(
                model=_MODEL,
                tenant=_TENANT,
                tier=_TIER,
                target=self._target,
                arrived_ms=1000 * request.at_s,
                prompt_tokens=request.prompt_tokens,
                max_tokens=4096,
            )
            sized = size_up(asked, self._lengths, latency, TokenWeights(), self._growing)
            self._demand.observe(request.at_s, sized.sample, request.number)
            self._growing.started(
                request.at_s + sized.work_ms / 1000,
                request.number,
                sized.key,
                forecast_tokens=sized.expected_output,
                step_ms=self._step_ms(latency),
            )

    def _step_ms(self, latency: LatencyModel) -> float:
        """Return a decode step with one request more than decode workers have now."""
        batches = self._batches()
        if not batches:
            return latency.decode.step_ms(1, 0)
        requests = statistics.fmean(seen.num_decode_requests for seen in batches)
        held = statistics.fmean(seen.sum_decode_kv_tokens for seen in batches)
        return latency.decode.step_ms(int(requests) + 1, int(held))

    def _batches(self) -> list[Pass]:
        return [seen for (role, _), seen in self._passes.items() if role is Role.DECODE and seen.num_decode_requests]

    def _finish(self, traffic: Mapping[str, Any], now_s: float) -> None:
        """Take what ended since the last tick: lengths, and whether the targets were met."""
        count = round(traffic["shape_count"])
        if not count:
            return
        prompt, output = round(traffic["avg_isl"] * count), round(traffic["avg_osl"] * count)
        for request in self.underway.ended(count, prompt, output, now_s):
            self._growing.ended(request.number, request.output_tokens)
            self._demand.ended(request.number, request.output_tokens)
            self._lengths.learn(_key(request.prompt_tokens), request.output_tokens)
            stamps = self._stamps(request, ttft_ms=traffic["avg_ttft_ms"], tpot_ms=traffic["avg_itl_ms"])
            self._blamed.add(now_s, blame(stamps))

    def _stamps(self, request: Asked, *, ttft_ms: float, tpot_ms: float) -> Stamps:
        """Return what an ended request went through, as far as it can be told."""
        latency, prompt = self.latency, request.prompt_tokens
        own_ms, step_ms = latency.prefill.ms(prompt), latency.decode.step_ms(1, prompt)
        waited_ms = max(0.0, ttft_ms - own_ms - step_ms)
        batches = self._batches()
        full = bool(batches) and all(seen.num_queued_decode for seen in batches)
        return Stamps(
            target=self._target,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            prefill_wait_ms=0.0 if full else waited_ms,
            decode_wait_ms=waited_ms if full else 0.0,
            prefill_ms=own_ms,
            expected_prefill_ms=own_ms,
            idle_step_ms=step_ms,
        )

    # -- deciding --------------------------------------------------------------------------------------

    def _counts(self, snapshot: Snapshot, now_s: float) -> Counts:
        next_ms = snapshot["now_ms"] + self._tick_ms
        prefill = snapshot["active_prefill_count"] + snapshot["starting_prefill_count"]
        decode = snapshot["active_decode_count"] + snapshot["starting_decode_count"]
        draining = snapshot["draining_prefill_count"] + snapshot["draining_decode_count"]
        if self._moving_to is not None and not draining:
            coming, self._moving_to = self._moving_to, None
            if coming is Role.PREFILL:
                return Counts(prefill=prefill + 1, decode=None, next_ms=next_ms)
            return Counts(prefill=None, decode=decode + 1, next_ms=next_ms)
        if now_s < self._next_look_s - 1e-6:
            return Counts(prefill=None, decode=None, next_ms=next_ms)
        self._next_look_s = now_s + _LOOK_S
        move = self._look(snapshot, now_s)
        if move is None:
            return Counts(prefill=None, decode=None, next_ms=next_ms)
        self.moves.append((now_s, move))
        self._moving_to = move.to_role
        if move.from_role is Role.PREFILL:
            return Counts(prefill=prefill - 1, decode=None, next_ms=next_ms)
        return Counts(prefill=None, decode=decode - 1, next_ms=next_ms)

    def _look(self, snapshot: Snapshot, now_s: float) -> Move | None:
        self._growing.look(now_s)
        sight = self.sight(snapshot, now_s)
        early = is_early(self.state, moving=sight.moving, alarms_s=sight.alarms_s)
        if now_s < self._next_decision_s - 1e-6 and not early:
            return None
        self._next_decision_s = now_s + self._limits.period_s
        fleet = Fleet(latency=self.latency, target=self._target)
        self.state, decision = decide(self.state, sight, fleet, self._limits, mode=Mode.AUTO, now_s=now_s)
        self.log.append((now_s, decision))
        return decision.move

    def sight(self, snapshot: Snapshot, now_s: float) -> Sight:
        """Return what the controller sees of a snapshot."""
        active = {Role.PREFILL: snapshot["active_prefill_ids"], Role.DECODE: snapshot["active_decode_ids"]}
        changing = ("draining_prefill", "draining_decode", "starting_prefill", "starting_decode")
        return Sight(
            split=Split(prefill=len(active[Role.PREFILL]), decode=len(active[Role.DECODE])),
            moving=self._moving_to is not None or any(snapshot[f"{change}_count"] for change in changing),
            donors=[
                Donor(worker_id=f"{role}-{max(ids)}", role=role, drain_s=self._drain_s(max(ids), role))
                for role, ids in active.items()
                if ids  # the mocker takes the worker that came last
            ],
            demand=self._demand.demand(now_s, self._moments),
            past=self._demand.segments,
            alarms_s=tuple(self._demand.alarms_s),
            blamed=self._blamed.blamed(now_s),
            waiting_in_time=self._waiting_in_time(active[Role.PREFILL], now_s),
        )

    def _drain_s(self, worker_id: int, role: Role) -> float:
        """Return the expected time until a worker is empty: of one that decodes, its newest answer's."""
        seen = self._passes.get((role, worker_id))
        latency = self.latency
        if seen is None:
            return 0.0
        if role is Role.PREFILL:
            return seen.sum_queued_prefill_tokens * latency.prefill.per_token_ms / 1000
        if not seen.num_decode_requests:
            return 0.0
        held = seen.sum_decode_kv_tokens / seen.num_decode_requests
        generous = self._lengths.forecast(_key(int(held))).quantile(GENEROUS_QUANTILE)
        return generous * latency.decode.step_ms(seen.num_decode_requests, seen.sum_decode_kv_tokens) / 1000

    def _waiting_in_time(self, prefills: Sequence[int], now_s: float) -> int:
        """Return how many requests wait for their prompts' turn and arrived late enough to be in time."""
        if self._target.ttft_ms is None:
            return 0
        while self._lately and self._lately[0].at_s < now_s - self._target.ttft_ms / 1000:
            self._lately.popleft()
        seen = [self._passes.get((Role.PREFILL, worker_id)) for worker_id in prefills]
        queued = sum(one.num_queued_prefill for one in seen if one is not None)
        return min(queued, len(self._lately))

    def _moments(self, kind: Hashable) -> OutputMoments:
        return self._growing.moments(kind, moments(self._lengths, kind))


def _tick_ms(requests: Sequence[Asked]) -> float:
    """Return a time between ticks in which about one in two sees a request end."""
    between_ms = 1000 * requests[-1].at_s / len(requests)
    return min(20.0, max(5.0, between_ms / 2))


def limits(switch_s: float) -> RatioLimits:
    """Return the policy's own limits under the direct hand-off, with no way to unified workers."""
    return msgspec.structs.replace(RatioLimits.of(HandOff.DIRECT), switch_s=switch_s, restart_s=_NEVER_S)


def _key(prompt_tokens: int) -> LengthKey:
    return LengthKey.of(model=_MODEL, tenant=_TENANT, prompt_tokens=prompt_tokens)
