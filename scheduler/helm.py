"""Who watches a pool while it is led, and what follows from it: window, decision log, ladder, ratio, series.

The dispatcher and the verdicts tell what happens to each request; a loop of its own looks each second:

1. The degrade ladder climbs or comes down.
2. Each period of the controller: read who decides, decide, tell.
3. Each 5 s a point of the series goes to Redis.
4. The decision log's lines go to its file.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat
from contracts.prefix import BLOCK_TOKENS
from contracts.series import PERIOD_S, add_command
from contracts.steering import Steering, decode_steering
from contracts.usage import Outcome
from contracts.wire import RequestOutcome
from observability.metrics import Instruments
from scheduler.actuator import Actuator, FlipResult
from scheduler.autoscaler import Autoscaler
from scheduler.book import Book, Request
from scheduler.boot import Boot
from scheduler.controller import RatioController
from scheduler.course import Course
from scheduler.decision_log import DecisionLog
from scheduler.degrade import Ladder
from scheduler.fleet.protocol import Fleet
from scheduler.legacy import save_command, take_over
from scheduler.memory import PoolMemory
from scheduler.outbox import Outbox
from scheduler.policy.decisions import Head
from scheduler.policy.headcount import ScaleLimits
from scheduler.policy.ladder import LadderLimits
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Mode, Move
from scheduler.policy.sight import RatioLimits
from scheduler.profile import PoolProfile
from scheduler.registry import WorkerRegistry
from scheduler.transitions import Transitions
from scheduler.waiting import WaitingQueue
from scheduler.window import SloWindow

log = structlog.get_logger()

_REDIS_TIMEOUT_S = 2.0


class HelmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What operators choose about it."""

    mode: Mode = Mode.AUTO
    decision_log: Path | None = None
    """Folder; None = no log."""
    decision_log_max_bytes: int = 64 * 1024 * 1024
    decision_log_keep: int = 8
    ratio: RatioLimits | None = None
    """None = those that suit the pool's hand-off."""
    ladder: LadderLimits = LadderLimits()
    scaling: Literal["auto", "shadow", "off"] = "auto"
    fleet_simulated: bool = False
    scale: ScaleLimits | None = None
    look_s: float = 1.0
    point_s: float = PERIOD_S


class Helm:
    """Steers one pool during one term."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        profile: PoolProfile,
        memory: PoolMemory,
        registry: WorkerRegistry,
        book: Book,
        waiting: WaitingQueue,
        outbox: Outbox,
        instruments: Instruments,
        settings: HelmSettings,
        actuator: Actuator,
        fleet: Fleet | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._pool = pool
        self._profile = profile
        self._memory = memory
        self._registry = registry
        self._waiting = waiting
        self._outbox = outbox
        self._now_s = now_s
        self._steering: Steering | None = None
        self._next_tick_s = 0.0
        self._settings = settings
        self.autoscaler: Autoscaler | None = None
        self.window = SloWindow(pool, latency=memory.costs.latency, instruments=instruments)
        self.decisions = DecisionLog(
            settings.decision_log, pool, max_bytes=settings.decision_log_max_bytes, keep=settings.decision_log_keep
        )
        self.ladder = Ladder(
            pool,
            profile=profile,
            registry=registry,
            waiting=waiting,
            latency=memory.costs.latency,
            decisions=self.decisions,
            limits=settings.ladder,
            wanted=self._wanted_mix,
        )
        self.controller = RatioController(
            pool,
            profile=profile,
            router=memory.router,
            registry=registry,
            book=book,
            waiting=waiting,
            window=self.window,
            actuator=actuator,
            decisions=self.decisions,
            instruments=instruments,
            mode=settings.mode,
            limits=settings.ratio,
        )
        if fleet is not None and profile.scaling is not None and settings.scaling != "off":
            self.autoscaler = autoscaler = Autoscaler(
                redis,
                pool,
                scaling=profile.scaling,
                neighbours=profile.neighbours,
                fleet=fleet,
                mode=settings.scaling,
                registry=registry,
                waiting=waiting,
                outbox=outbox,
                controller=self.controller,
                window=self.window,
                actuator=actuator,
                decisions=self.decisions,
                instruments=instruments,
                simulated=settings.fleet_simulated,
                limits=settings.scale,
            )
            self.controller.hold = lambda: autoscaler.settling
        actuator.ended = self._flipped
        self._transitions = Transitions(pool, instruments)
        self._course = Course(
            registry=registry,
            waiting=waiting,
            window=self.window,
            controller=self.controller,
            ladder=self.ladder,
            costs=memory.costs,
            plan=lambda: self.autoscaler.plan if self.autoscaler is not None else None,
        )

    def _wanted_mix(self) -> Split | None:
        """Return what the autoscaler asks for; None = nobody starts workers."""
        if self.autoscaler is None or self._settings.scaling != "auto":
            return None
        return self.autoscaler.desired or Split()

    @property
    def workers_come(self) -> bool:
        """Whether a request that finds no worker may wait for one to be started."""
        return self.autoscaler is not None and self.autoscaler.waking

    @property
    def cold(self) -> Boot | None:
        """The start that last woke the pool."""
        return self.autoscaler.cold if self.autoscaler is not None else None

    def retry_after_s(self) -> float:
        """Return when a pool that serves nobody is expected to; 0 = it serves, or nobody knows."""
        return (self.autoscaler.cold_s or 0.0) if self.autoscaler is not None else 0.0

    # -- what happens to requests --------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Take a request that arrives for the first time."""
        self.controller.arrived(request)
        if self.autoscaler is not None:
            self.autoscaler.arrived(request)
        self.decisions.arrived(request)

    def refused(self, request: Request, reason: str, *, retry_after_s: float | None, for_capacity: bool) -> None:
        """Take a request that is sent away."""
        self.decisions.refused(request, reason, retry_after_s)
        if for_capacity:
            self.window.refused(request)

    def generated(self, request: Request, *, complete: bool) -> None:
        """Take that an answer grows no more, however late it is settled."""
        if complete:
            made = [part.counts.completion_tokens for part in request.streaming_parts if part.counts is not None]
            self._memory.router.generated(request, request.num_delivered + max(made, default=0))
        else:
            self._memory.router.broken_off(request)

    def ended(self, request: Request, outcome: RequestOutcome | None) -> None:
        """Take a settled request; `outcome` is None when its news got lost."""
        ran = request.charged
        if outcome is None:
            self._broken_off(request)
        else:
            if outcome.outcome != Outcome.REFUSED and ran:
                stage = self.window.ended(request, outcome)
                self.decisions.ended(request, outcome, stage)
            if outcome.outcome == Outcome.FINISHED and not request.submit.warm_replica:
                output_tokens = outcome.completion_tokens // request.submit.num_samples
                self._memory.router.learn(request, output_tokens)
                self.controller.answered(request, output_tokens)
            else:
                self._broken_off(request)
            if ran:
                cost = self._memory.router.actual_cost(
                    request,
                    cached_tokens=outcome.cached_tokens * request.submit.num_samples,
                    output_tokens=outcome.completion_tokens,
                )
                self._waiting.correct(request, cost)

    def _broken_off(self, request: Request) -> None:
        self._memory.router.broken_off(request)
        self.controller.answered(request, None)

    def _flipped(self, move: Move, why: str, result: FlipResult) -> None:
        self.controller.flipped(move, why, done=result.ok)

    async def begin(self) -> None:
        """Take over what the former leader knew. Before the term serves anybody."""
        await take_over(self._redis, self._pool, self._memory, self.controller, self.ladder, self.autoscaler)

    async def scale(self) -> None:
        """Start and stop workers until cancelled, if there is a fleet for it."""
        if self.autoscaler is not None:
            await self.autoscaler.run()

    # -- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Steer until cancelled."""
        self.decisions.begin(self._head, list(self._registry.workers()))
        self._next_tick_s = self._now_s() + self.controller.limits.period_s
        next_point_s = self._now_s() + self._settings.point_s
        try:
            while True:
                await beat(self._settings.look_s)
                now_s = self._now_s()
                tick = now_s >= self._next_tick_s
                if tick:
                    await self._read_steering()
                point = now_s >= next_point_s
                if point:
                    next_point_s = max(next_point_s + self._settings.point_s, now_s)
                try:
                    self._look(tick=tick, point=point)
                except Exception:  # requests are served without steering, too
                    log.exception("steering_failed", pool=self._pool)
        finally:
            self.decisions.end()

    def _look(self, *, tick: bool, point: bool) -> None:
        changed = self.ladder.tick()
        if tick or self.controller.early:
            self._next_tick_s = self._now_s() + self.controller.limits.period_s
            self.controller.tick(self._steering)
        if point or changed:  # gateways send those who agreed to a local model as soon as they see it
            self._outbox.write(add_command(self._pool, self._course.point()))
            self._outbox.write(save_command(self._pool, self._memory, self.controller, self.ladder, self.autoscaler))
        workers = list(self._registry.workers())
        self._transitions.look(workers)
        self.decisions.workers(workers)
        self.decisions.flush()

    async def _read_steering(self) -> None:
        """Read who decides; while Redis is away, what was read last holds."""
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                raw: Any = await self._redis.get(keys.steering(self._pool))
            self._steering = decode_steering(raw) if raw else None
        except (RedisError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("steering_not_read", pool=self._pool, error=str(error))

    def _head(self, at_unix_ms: int) -> Head:
        return Head(
            at_unix_ms=at_unix_ms,
            model=self._profile.model or self._pool,
            hand_off=self._profile.hand_off,
            mode=self._settings.mode,
            latency=self._memory.costs.latency(),
            targets=self._profile.tiers,
            block_tokens=BLOCK_TOKENS,
        )
