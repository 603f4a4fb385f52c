"""How many workers prefill, decode and do both: policy.ratio in production.

1. Each arrival is observed where it arrives; each outcome comes from the SLO window.
2. Each period the controller reads who decides (contracts.steering), looks at the pool, decides, and says why:
   a metric, a row of the decision log, and the pool's series.
3. A move goes to the actuator, one at a time. Under `shadow` nothing happens, and nothing is remembered as done.

A side of the pairs that is empty while a worker of it is on its way (starting, restarting) is not taken for lost.
"""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from contracts.lifecycle import Role, WorkerState
from contracts.series import Flip
from contracts.steering import Steering
from observability.metrics import Instruments
from scheduler.book import Book, Request
from scheduler.decision_log import DecisionLog
from scheduler.policy.demand import Demand, DemandWindow
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Decision, Mode, Move, decide, is_early
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight
from scheduler.policy.turns import BATCH_TIER
from scheduler.profile import PoolProfile
from scheduler.registry import WorkerRegistry
from scheduler.router import Router
from scheduler.waiting import WaitingQueue
from scheduler.window import SloWindow
from scheduler.worker import Worker

log = structlog.get_logger()

_LEFT_ALONE_S = 300.0
_SETTLES_WITHIN_S = 15.0
_MOVING = (WorkerState.DRAINING, WorkerState.SWITCHING)


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller hands to the next leader's: gains, the last move, how the demand changed."""

    state: RatioState
    segments: tuple[Demand, ...]
    alarms_ago_s: tuple[float, ...]


class Actuator(Protocol):
    """Who changes workers' roles."""

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""

    def begin(self, move: Move, why: str) -> bool:
        """Start a change; False = not now. `RatioController.flipped` hears of its end."""


class RatioController:
    """Steers one pool during one term."""

    def __init__(
        self,
        pool: str,
        *,
        profile: PoolProfile,
        router: Router,
        registry: WorkerRegistry,
        book: Book,
        waiting: WaitingQueue,
        window: SloWindow,
        actuator: Actuator,
        decisions: DecisionLog,
        instruments: Instruments,
        mode: Mode,
        limits: RatioLimits | None = None,
        empty_grace_s: float = 5.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._profile = profile
        self._router = router
        self._registry = registry
        self._book = book
        self._waiting = waiting
        self._window = window
        self._actuator = actuator
        self._decisions = decisions
        self._instruments = instruments
        self._default = Steering(mode=mode.value)
        self.limits = limits or RatioLimits.of(profile.hand_off)
        self._empty_grace_s = empty_grace_s
        self._empty_since_s: float | None = None
        self._now_s = now_s
        self._demand = DemandWindow()
        self.state = RatioState()
        self._flips: list[Flip] = []
        self._failed_until_s: dict[str, float] = {}
        self._settling: tuple[str, float] | None = None  # a worker in its new role, until it is seen ready
        self.steering = self._default
        self.hold: Callable[[], bool] = lambda: False
        """Whether roles are left alone for the moment: workers that will serve soon are not seen yet."""
        self.last: Decision | None = None
        """The last decision of the term."""
        self.demand: Demand | None = None
        """What the last decision was made on."""

    # -- from leader to leader -----------------------------------------------------------------------

    def decided(self) -> Decided:
        """Return what was learned and done, its times as ages."""
        now_s, state = self._now_s(), self.state
        return Decided(
            state=msgspec.structs.replace(
                state,
                last_tick_s=_aged(state.last_tick_s, now_s),
                last_move_s=_aged(state.last_move_s, now_s),
                last_alarm_s=None,
            ),
            segments=tuple(self._demand.segments),
            alarms_ago_s=tuple(now_s - at_s for at_s in self._demand.alarms_s),
        )

    def restore(self, decided: Decided, *, ago_s: float) -> None:
        """Go on where a former leader stopped, so many seconds ago. Before the first tick."""
        now_s, state = self._now_s(), decided.state
        alarms_s = [now_s - ago_s - age_s for age_s in decided.alarms_ago_s]
        self.state = msgspec.structs.replace(
            state,
            last_alarm_s=next(reversed(alarms_s), None),
            saw_move=False,
            last_tick_s=now_s,  # nobody looked meanwhile, and gains learn from what is seen
            last_move_s=now_s - ago_s - state.last_move_s if state.last_move_s is not None else None,
            favoured=None,
            favoured_ticks=0,
        )
        self._demand.restore(decided.segments, alarms_s)

    # -- what happens --------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Count the work of a request that arrives for the first time. Batch work steers nothing."""
        if request.sized is not None and request.tier != BATCH_TIER:
            self._demand.observe(self._now_s(), request.sized.sample, request.rid)

    def answered(self, request: Request, output_tokens: int | None) -> None:
        """Take how long an answer got, per sample; None = there is none, or not all of it."""
        self._demand.ended(request.rid, output_tokens)

    def flipped(self, move: Move, why: str, *, done: bool) -> None:
        """Take how a change of role ended. A worker that failed is left alone for a while."""
        self._flips.append(_flip(move, why, done=done))
        if done:
            self._settling = (move.worker_id, self._now_s() + _SETTLES_WITHIN_S)
        else:
            self._failed_until_s[move.worker_id] = self._now_s() + _LEFT_ALONE_S

    def take_flips(self) -> tuple[Flip, ...]:
        """Return the changes since the last call."""
        flips, self._flips = tuple(self._flips), []
        return flips

    # -- deciding ------------------------------------------------------------------------------------

    @property
    def early(self) -> bool:
        """Whether something has happened that the next decision should not wait for."""
        sight = self._sight(self._now_s())
        return is_early(self.state, moving=sight.moving, alarms_s=sight.alarms_s)

    def tick(self, steering: Steering | None) -> Decision:
        """Decide, act on it if the mode says so, and tell."""
        now_s = self._now_s()
        self.steering = steering or self._default
        mode = Mode(self.steering.mode)
        limits = self.limits
        if mode is Mode.MANUAL:
            pin = (
                Split(prefill=steering.prefill, decode=steering.decode, unified=steering.unified) if steering else None
            )
            limits = msgspec.structs.replace(limits, pinned=pin)
        self._router.growing.look(now_s)
        sight = self._sight(now_s)
        if not self._router.costs_known():  # predictions from a guess move nobody
            sight = msgspec.structs.replace(sight, demand=None)
        self.demand = sight.demand
        state, decision = decide(self.state, sight, self.fleet(), limits, mode=mode, now_s=now_s)
        if decision.move is None:
            self.state = state
        elif mode is Mode.SHADOW:
            self._flips.append(_flip(decision.move, decision.why.value, done=False))
            self.state = _not_moved(state, self.state)
        elif self._actuator.begin(decision.move, decision.why.value):
            self.state = state
        else:
            self.state = _not_moved(state, self.state)
        self._tell(decision, mode, sight)
        self.last = decision
        return decision

    def _tell(self, decision: Decision, mode: Mode, sight: Sight) -> None:
        self._instruments.controller_ticks.add(
            1, {"pool": self._pool, "mode": mode.value, "reason": decision.why.value}
        )
        self._decisions.ticked(decision, self.state, sight)
        if decision.move is not None:
            log.info(
                "ratio_move",
                pool=self._pool,
                mode=mode.value,
                worker_id=decision.move.worker_id,
                from_role=decision.move.from_role,
                to_role=decision.move.to_role,
                why=decision.why.value,
                split=str(decision.split),
                target=str(decision.target),
                gain=round(decision.gain, 3),
            )

    def measured(self) -> Demand | None:
        """Return what requests will ask for: answers as forecast; None = that or the workers' costs are not known."""
        if not self._router.costs_known():
            return None
        return self._demand.demand(self._now_s(), self._router.moments, as_forecast=True)

    # -- what is seen --------------------------------------------------------------------------------

    def _sight(self, now_s: float) -> Sight:
        workers = list(self._registry.workers())
        ready = [worker for worker in workers if worker.ready]
        counts = dict.fromkeys(Role, 0)
        for worker in ready:
            counts[worker.role] += 1
        split = Split(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], unified=counts[Role.UNIFIED])
        return Sight(
            split=split,
            moving=self._actuator.busy
            or any(w.leased and w.state in _MOVING and not w.departing for w in workers)
            or self.hold()
            or self._settles(ready, now_s)
            or self._side_may_return(split, workers, now_s),
            donors=[self._donor(w) for w in ready if self._failed_until_s.get(w.worker_id, 0.0) <= now_s],
            demand=self._demand.demand(now_s, self._router.moments),
            past=self._demand.segments,
            alarms_s=tuple(self._demand.alarms_s),
            blamed=self._window.blamed(),
            waiting_in_time=self._waiting.num_in_time,
        )

    def _settles(self, ready: list[Worker], now_s: float) -> bool:
        """Whether the worker moved last is on its way back: until it is seen, the split lacks it."""
        if self._settling is not None:
            worker_id, until_s = self._settling
            if now_s >= until_s or any(worker.worker_id == worker_id for worker in ready):
                self._settling = None
        return self._settling is not None

    def _side_may_return(self, split: Split, workers: list[Worker], now_s: float) -> bool:
        """Whether one side of the pairs is empty only for a moment."""
        if bool(split.prefill) == bool(split.decode):
            self._empty_since_s = None
            return False
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        side = Role.DECODE if split.prefill else Role.PREFILL
        coming = any(w.leased and w.role is side and w.state is not WorkerState.STOPPED for w in workers)
        return coming or now_s - self._empty_since_s < self._empty_grace_s

    def fleet(self) -> Fleet:
        """Return what workers cost and promise, with the room that those of the pool have on average."""
        latency = self._router.latency
        ready = [w for w in self._registry.workers() if w.ready]
        if ready:
            latency = msgspec.structs.replace(
                latency,
                kv_capacity_tokens=sum(w.kv_capacity_tokens for w in ready) // len(ready),
                max_running=sum(w.registration.max_running for w in ready) // len(ready),
            )
        return Fleet(latency=latency, target=self._profile.target)

    def _donor(self, worker: Worker) -> Donor:
        return Donor(
            worker_id=worker.worker_id,
            role=worker.role,
            drain_s=self.drain_s(worker),
            cached_tokens=self._router.prefixes.held_tokens(worker.worker_id),
        )

    def drain_s(self, worker: Worker) -> float:
        """Return the expected time until a worker is empty."""
        latency = self._router.latency
        step_ms = latency.decode.step_ms(*worker.view().batch)
        longest_ms = worker.queued_prefill_tokens * latency.prefill.per_token_ms
        if worker.role is not Role.PREFILL:
            now_ms = self._now_s() * 1000
            for rid, _, _ in worker.charges:
                request = self._book.find(rid)
                if request is not None and request.sized is not None:
                    since_ms = max(0.0, now_ms - request.placed_ms)
                    left_ms = request.sized.generous_output * step_ms - since_ms
                    longest_ms = max(longest_ms, left_ms, 0.3 * since_ms)
        return longest_ms / 1000


def _aged(at_s: float | None, now_s: float) -> float | None:
    return now_s - at_s if at_s is not None else None


def _flip(move: Move, why: str, *, done: bool) -> Flip:
    return Flip(
        worker_id=move.worker_id, from_role=move.from_role.value, to_role=move.to_role.value, why=why, done=done
    )


def _not_moved(after: RatioState, before: RatioState) -> RatioState:
    """Return the state of a tick whose move did not happen: its gains count, its move does not."""
    return msgspec.structs.replace(
        after,
        saw_move=False,
        last_move_s=before.last_move_s,
        last_from=before.last_from,
        last_to=before.last_to,
        reversals=before.reversals,
    )
