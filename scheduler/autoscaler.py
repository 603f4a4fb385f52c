"""How many workers a pool has: policy.scaling in production, for pools that a fleet serves (catalogue: `scaling`).

1. Arrivals are counted where they arrive; what they ask for comes from the ratio controller's window.
2. Each half second: starts that have ended are measured, drained workers stopped, and gateways told how things stand
   (contracts.scaling.ScaleNote): whether the pool serves, and if not, when it is expected to.
3. Each period, and at once when somebody waits and nobody serves: look, decide, tell why (a metric, a row of the
   decision log), and under `auto` start and drain. Under `shadow` nothing happens, and nothing is remembered as done.

A new term stops nobody before it has watched for as long as the policy wants fewer to have been enough.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.lifecycle import Role
from contracts.scaling import NANO_PER_UNIT, ScaleNote, Scaling, encode_note
from observability.metrics import Instruments
from scheduler.actuator import Actuator
from scheduler.book import Request
from scheduler.boot import Boot
from scheduler.bounds import bounds_of
from scheduler.controller import RatioController
from scheduler.crew import Crew
from scheduler.decision_log import DecisionLog
from scheduler.fleet.protocol import Fleet, FleetError, Price
from scheduler.outbox import Outbox
from scheduler.policy.handover import Handover, Past
from scheduler.policy.headcount import (
    Ground,
    Lull,
    ScaleLimits,
    ScalePlan,
    ScaleSight,
    ScaleState,
    Start,
    Step,
    Wake,
    WhyScale,
)
from scheduler.policy.packing import PackingLimits
from scheduler.policy.queueing import Corrections, Split
from scheduler.policy.scaling import scale
from scheduler.policy.turns import BATCH_TIER
from scheduler.registry import WorkerRegistry
from scheduler.room import SharedRoom
from scheduler.waiting import WaitingQueue
from scheduler.window import SloWindow

log = structlog.get_logger()

LOOK_S: Final = 0.5
CLOSE_LOOK_S: Final = 0.1
"""While somebody comes: their start is measured by it."""
NOTE_HOLDS_MS: Final = 10_000
BOOT_PRIOR_S: Final = 60.0
"""Before any start was measured."""
WAKE_PRIOR_S: Final = 5.0
"""Where workers do not say, and none has been woken."""
_BOOT_WEIGHT: Final = 0.3
_LEAST_LEFT_S: Final = 1.0
_REDIS_TIMEOUT_S: Final = 2.0

ScaleMode = Literal["auto", "shadow"]


class Autoscaler:
    """Scales one pool during one term."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        scaling: Scaling,
        neighbours: Sequence[str] = (),
        fleet: Fleet,
        mode: ScaleMode,
        registry: WorkerRegistry,
        waiting: WaitingQueue,
        outbox: Outbox,
        controller: RatioController,
        window: SloWindow,
        actuator: Actuator,
        decisions: DecisionLog,
        instruments: Instruments,
        simulated: bool = False,
        limits: ScaleLimits | None = None,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_ms: Callable[[], float] = lambda: time.time() * 1000,
    ) -> None:
        """`simulated`: the fleet's workers run the timed engine. `neighbours`: pools that may share its machines."""
        self._redis = redis
        self._pool = pool
        self._scaling = scaling
        self._fleet = fleet
        self._mode = mode
        self._registry = registry
        self._waiting = waiting
        self._outbox = outbox
        self._controller = controller
        self._window = window
        self._actuator = actuator
        self._decisions = decisions
        self._instruments = instruments
        self._simulated = simulated
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms
        self.limits = limits or ScaleLimits()
        self.bounds = bounds_of(scaling)
        self.crew = Crew(
            pool, fleet=fleet, registry=registry, drain_s=controller.drain_s, now_s=now_s, now_unix_ms=now_unix_ms
        )
        self._room = SharedRoom(
            redis,
            pool,
            neighbours=neighbours,
            crew=self.crew,
            bounds=self.bounds,
            limits=PackingLimits(residence_s=scaling.residence_s),
            clear_s=self.limits.clear_s,
        )
        self._past = Past()
        self._state = ScaleState(last_up_s=now_s())
        self._busy_s = now_s()
        self._boot_s = BOOT_PRIOR_S
        self._wake_s: float | None = None
        self._price = Price(per_hour=scaling.price_nano)
        self._blocked = ""
        self._stir = asyncio.Event()
        self.plan: ScalePlan | None = None
        """The last decision of the term."""
        self._cold: Boot | None = None
        self._boots: list[Boot] = []

    # -- what others ask ---------------------------------------------------------------------------

    @property
    def desired(self) -> Split | None:
        """The mix that the last decision asks for."""
        return self.plan.desired if self.plan is not None else None

    @property
    def settling(self) -> bool:
        """Whether roles are left alone: somebody is about to serve, or workers are being replaced role by role."""
        return self.crew.loading or (self._mode == "auto" and self._state.renewing is not None)

    @property
    def serving(self) -> bool:
        """Whether a request could be placed now."""
        counts = dict.fromkeys(Role, 0)
        for worker in self._registry.workers():
            counts[worker.role] += worker.ready
        return bool(counts[Role.UNIFIED] or (counts[Role.PREFILL] and counts[Role.DECODE]))

    @property
    def waking(self) -> bool:
        """Whether requests that find no worker may wait: one can be expected."""
        return self._mode == "auto" and not self._blocked

    @property
    def cold_s(self) -> float | None:
        """Seconds until a pool that serves nobody is expected to; None = it serves."""
        if self.serving:
            return None
        if self._mode == "auto" and self.crew.wakeable:
            wake_s = self._wake_s or self.crew.wake_s or WAKE_PRIOR_S
            return max(_LEAST_LEFT_S, wake_s - self.crew.sleepers.asked_ago_s())
        ago_s = self.crew.asked_ago_s()
        if ago_s is None:
            return self._boot_s
        return max(_LEAST_LEFT_S, self._boot_s - ago_s)

    @property
    def cold(self) -> Boot | None:
        """How the worker came that last brought the pool to serve, as of now: whoever waited for it asks at once."""
        self._see_who_has_come()
        return self._cold

    def handover(self) -> Handover:
        """Return what the next leader should know."""
        return self._past.handover(self._state, self._controller.measured(), self._now_s())

    def restore(self, handover: Handover, *, ago_s: float) -> None:
        """Go on with what a former term knew so many seconds ago. Before the first arrival and the first tick."""
        self._state = self._past.restore(handover, self._state, self._now_s(), ago_s=ago_s)

    @property
    def cost_per_hour(self) -> float:
        """What the pool's workers cost, currency units per hour."""
        spot = self._price.spot_per_hour
        nano = sum(
            spot if instance.spec.spot and spot is not None else self._price.per_hour
            for instance in self.crew.instances
        )
        return nano / NANO_PER_UNIT

    # -- what happens ------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Count a request that arrives for the first time. Batch lines wait for room instead of asking for it."""
        self._busy_s = self._now_s()
        if request.tier != BATCH_TIER:
            self._past.trend.observe(self._busy_s)
        if not self.serving:
            self._stir.set()

    async def run(self) -> None:
        """Scale until cancelled."""
        await self._recall_boot()
        next_s = read_s = self._now_s()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LOOK_S if self.crew.booting else LOOK_S):
                    await self._stir.wait()
            stirred = self._stir.is_set()
            self._stir.clear()
            now_s = self._now_s()
            due, read = stirred or now_s >= next_s, now_s >= read_s
            read_s = now_s + LOOK_S if read else read_s
            try:
                await self._look(decide=due, read=read)
            except FleetError as error:
                if self._blocked != str(error):  # once per outage
                    log.warning("fleet_failed", pool=self._pool, error=str(error))
                self._blocked = str(error)
            except Exception:  # requests are served without it, too
                log.exception("scaling_failed", pool=self._pool)
            if due:
                next_s = self._now_s() + self.limits.period_s
            if due or read:
                self._tell()
            if stirred:
                await asyncio.sleep(CLOSE_LOOK_S)  # a crowd of arrivals asks once

    async def _look(self, *, decide: bool, read: bool) -> None:
        if decide or (read and self.crew.restless):
            await self.crew.read()
        self._see_who_has_come()
        while self._boots:
            await self._booted(self._boots.pop(0))
        await self.crew.see_off()
        if decide:
            await self._decide()

    # -- deciding ----------------------------------------------------------------------------------

    async def _decide(self) -> None:
        await self._recall_renewal()
        await self._room.read()
        now_s, before = self._now_s(), self._state
        ground = await self._ground()
        sight = self._sight(now_s, ground)
        if sight.num_waiting or sight.num_running:
            self._busy_s = now_s
        state, plan = scale(before, sight, self.bounds, self._controller.fleet(), self.limits, now_s)
        acts = bool(plan.steps) and self._mode == "auto"
        self._state = state if acts or not plan.steps else _not_done(state, before)
        self._instruments.scale_ticks.add(1, {"pool": self._pool, "mode": self._mode, "reason": plan.why.value})
        self._decisions.scaled(plan, self._mode, changed=self.plan is None or plan.why is not self.plan.why)
        self.plan = plan
        self._room.look(plan, sight, boot_s=self._boot_s if self._boot_s != BOOT_PRIOR_S else None, now_s=now_s)
        self._give_way(sight, now_s)
        self._blocked = self._what_blocks(plan)
        if plan.steps:
            log.info(
                "scaling",
                pool=self._pool,
                mode=self._mode,
                why=plan.why.value,
                split=str(plan.split),
                desired=str(plan.desired),
                steps=len(plan.steps),
                rate_rps=plan.rate_rps,
                ahead_rps=plan.ahead_rps,
                attained=round(plan.attained, 4) if plan.attained is not None else None,
                missed_of_foreseen=round(plan.belief.factor, 3),
            )
        if acts:
            await self._act(plan)

    async def _act(self, plan: ScalePlan) -> None:
        for step in plan.steps:
            what, worker_id = await self._take(step)
            labels = {"pool": self._pool, "step": what, "role": step.role.value, "reason": step.why.value}
            self._instruments.scale_steps.add(1, labels)
            log.info("scale_step", pool=self._pool, step=what, worker_id=worker_id, role=step.role, why=step.why.value)

    async def _take(self, step: Step) -> tuple[str, str]:
        """Take one step; return what it is called, and whom it was about."""
        match step:
            case Start():
                return "start", await self.crew.start(step.role, zone=step.zone, spot=step.spot)
            case Wake():
                self.crew.wake(step.worker_id)
                return "wake", step.worker_id
            case Lull():
                self.crew.lull(step.worker_id)
                return "sleep", step.worker_id
            case _:
                self.crew.let_go(step.worker_id, for_good=step.why is WhyScale.RENEW)
                return "stop", step.worker_id

    def _give_way(self, sight: ScaleSight, now_s: float) -> None:
        given = self._room.to_give(sight, now_s) if self._mode == "auto" else None
        for member in given[1] if given is not None else ():
            self.crew.let_go(member.worker_id, for_good=True)
            labels = {"pool": self._pool, "step": "stop", "role": member.role.value, "reason": WhyScale.EVICTED.value}
            self._instruments.scale_steps.add(1, labels)
            log.info("worker_evicted", pool=self._pool, worker_id=member.worker_id, taker=given and given[0].taker)

    async def _ground(self) -> Ground:
        """Return what the fleet offers: never more than the operator allows, those that do not stay up included."""
        capacity = await self._fleet.capacity(self._pool)
        price = await self._fleet.price(self._pool)
        if price.per_hour or price.spot_per_hour is not None:
            self._price = price
        if self._mode == "auto":
            for worker_id in self.crew.stranded(capacity.free, after_s=self.limits.stranded_s):
                log.warning("worker_given_up", pool=self._pool, worker_id=worker_id)
                self.crew.give_up(worker_id)
        self._room.crowded = capacity.crowded
        back = self.crew.recallable
        left = max(0, self.bounds.max_workers - len(self.crew.instances) + sum(back.values()))
        if self.crew.failed and not self.serving:
            left = 0  # another one would fail like them
        if self._room.is_anothers:
            left = 0
        bad = self.crew.bad_zones()
        bad = bad if capacity.free.keys() - bad else ()  # nowhere else to go
        return Ground(
            free={z: min(number + back.get(z, 0), left) for z, number in capacity.free.items() if z not in bad},
            free_spot={z: min(number, left) for z, number in capacity.free_spot.items() if z not in bad},
            per_hour=self._price.per_hour,
            spot_per_hour=self._price.spot_per_hour,
        )

    def _sight(self, now_s: float, ground: Ground) -> ScaleSight:
        move, state = self._actuator.moving, self._controller.state
        moving: Mapping[str, Role] = {move.worker_id: move.to_role} if move is not None else {}
        return ScaleSight(
            members=self.crew.members(moving),
            asleep=self.crew.asleep(),
            ground=ground,
            demand=self._past.demand(self._controller.measured(), now_s),
            rate=self._past.trend.forecast(now_s, ahead_s=self._boot_s + self.limits.fresh_s),
            corrections=Corrections(
                prefill=state.prefill_gain,
                decode=state.decode_gain,
                backlog_rps=self._waiting.num_in_time / self.limits.clear_s,
            ),
            num_waiting=len(self._waiting),
            num_running=sum(worker.num_requests for worker in self._registry.workers()),
            quiet_s=now_s - self._busy_s,
            boot_s=self._boot_s,
            flipping=self._actuator.busy,
            failing=bool(self.crew.failed),
            num_leaving=self.crew.num_leaving,
            outcomes=self._window.take_outcomes(),
        )

    def _what_blocks(self, plan: ScalePlan) -> str:
        """Return why nobody can be expected, where nobody serves and nobody is on the way."""
        if self.serving or (not self.crew.failed and self.crew.restless):
            return ""
        if self.crew.failed:
            return f"its workers do not stay up: {self.crew.failed[0].message}"
        if plan.steps or not self._waiting or self._room.comes:
            return ""
        return f"no worker can be had: {plan.why.value}"

    # -- telling -----------------------------------------------------------------------------------

    async def _booted(self, boot: Boot) -> None:
        parts = {phase: max(0.0, end_ms - begin_ms) for phase, begin_ms, end_ms in boot.parts}
        for phase, ms in parts.items():
            self._instruments.cold_start(ms, pool=self._pool, phase=phase)
        told = {f"{phase}_s": round(ms / 1000, 2) for phase, ms in parts.items()}
        log.info("worker_woken" if boot.woken else "worker_booted", pool=self._pool, worker_id=boot.worker_id, **told)
        if boot.woken:
            before_s = self._wake_s or boot.whole_s
            self._wake_s = before_s + _BOOT_WEIGHT * (boot.whole_s - before_s)
            return
        first = self._boot_s == BOOT_PRIOR_S
        self._boot_s = boot.whole_s if first else self._boot_s + _BOOT_WEIGHT * (boot.whole_s - self._boot_s)
        with contextlib.suppress(RedisError, TimeoutError):
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                await self._redis.set(keys.boot(self._pool), f"{self._boot_s:.3f}")

    def _see_who_has_come(self) -> None:
        for boot in self.crew.look():
            self._boots.append(boot)
            if [w.worker_id for w in self._registry.workers() if w.ready] == [boot.worker_id]:
                self._cold = boot

    async def _recall_boot(self) -> None:
        """Begin with what former terms measured."""
        with contextlib.suppress(RedisError, TimeoutError, ValueError):
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                raw: Any = await self._redis.get(keys.boot(self._pool))
            self._boot_s = float(raw) if raw else BOOT_PRIOR_S

    async def _recall_renewal(self) -> None:
        """Read when an operator asked for new workers; while Redis is away, what was read last holds."""
        with contextlib.suppress(RedisError, TimeoutError, ValueError):
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                raw: Any = await self._redis.get(keys.renewal(self._pool))
            self.crew.renew_before_ms = int(raw) if raw else 0

    def _tell(self) -> None:
        desired = self.desired or Split()
        note = ScaleNote(
            at_unix_ms=int(self._now_unix_ms()),
            mode=self._mode,
            prefill=desired.prefill,
            decode=desired.decode,
            unified=desired.unified,
            why=self.plan.why.value if self.plan is not None else "",
            cold_s=self.cold_s,
            blocked=self._blocked,
            simulated=self._simulated,
        )
        self._outbox.write(("SET", keys.scaling(self._pool), encode_note(self._room.told(note)), "PX", NOTE_HOLDS_MS))


def _not_done(after: ScaleState, before: ScaleState) -> ScaleState:
    """Return the state of a tick whose steps nobody took."""
    return msgspec.structs.replace(
        after, last_up_s=before.last_up_s, last_down_s=before.last_down_s, renewing=before.renewing
    )
