"""One pool in one scheduler process: stand by, lead a term, stand by again.

A term begins with the lease and ends with it. Everything the leader knows of requests lives in the term and
dies with it; the next leader, here or elsewhere, finds it in Redis and on the workers (takeover.py).
"""

import asyncio
import time

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts.beat import beat
from contracts.credentials import credentials_of
from contracts.lifecycle import RequestState
from contracts.resp import RespConnection
from contracts.settlement import SettlementScripts
from contracts.v1 import worker_pb2 as pb
from observability.metrics import Instruments
from observability.tracing import Tracer
from scheduler.actuator import Actuator
from scheduler.attempts import Attempts
from scheduler.book import Book
from scheduler.dispatch import Dispatcher
from scheduler.fleet.protocol import Fleet
from scheduler.handoff import HandOffTimers
from scheduler.helm import Helm, HelmSettings
from scheduler.inbox import Inbox
from scheduler.intake import Intake
from scheduler.leader import LeaderLease, LeadershipLost
from scheduler.links import Links
from scheduler.memory import PoolMemory
from scheduler.orders import Orders
from scheduler.outbox import Outbox
from scheduler.outcomes import Outcomes
from scheduler.policy.cluster import Limits
from scheduler.profile import PoolProfile
from scheduler.record import WriteAhead
from scheduler.registry import WorkerRegistry
from scheduler.retries import Retries, RetryBudget, largest_kv_tokens
from scheduler.settings import Settings, Timing
from scheduler.settlement import DeadGateways
from scheduler.shares import Shares
from scheduler.spans import Spans
from scheduler.takeover import Takeover
from scheduler.verdicts import Verdicts
from scheduler.waiting import WaitingQueue
from scheduler.worker import Worker
from scheduler.yields import Yields

log = structlog.get_logger()

_BLOCK_S = 1.0
_READ_APART_S = 0.006
_REDIS_RETRY_S = 0.2
_REDIS_TIMEOUT_S = 2.0
_UNHEARD_AFTER_S = 5.0
"""How long an ended request waits for its outcome before its inbox entry is looked up."""


class PoolScheduler:
    """Serves one pool, as leader or standby."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        settings: Settings,
        instruments: Instruments,
        tracer: Tracer,
        profile: PoolProfile | None = None,
        limits: Limits | None = None,
        timing: Timing | None = None,
        helm: HelmSettings | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._fleet = fleet
        self._helm = helm
        self._profile = profile or PoolProfile()
        self._timing = timing or Timing()
        self._limits = limits or Limits()
        self._instruments = instruments
        self._spans = Spans(tracer, pool=pool)
        self.pool = pool
        self.memory = PoolMemory(self._profile, send=self._send)
        self._looks = RespConnection(settings.redis_url, timeout_s=_REDIS_TIMEOUT_S)
        self.registry = WorkerRegistry(
            self._looks,
            pool,
            scheduler_id=settings.id,
            suspect_after_s=settings.suspect_after_s,
            dead_after_s=settings.dead_after_s,
            discover_s=self._timing.discover_s,
            observer=self.memory,
            heard_role=self._heard_role,
            credentials=credentials_of("SCHEDULER_", settings),
        )
        self.actuator = Actuator(
            pool,
            workers=self.registry.workers,
            send=self.registry.send,
            leader_epoch=lambda: self.registry.leader_epoch,
            instruments=instruments,
        )
        self.lease = LeaderLease(
            redis,
            pool,
            settings.id,
            ttl_s=self._timing.lease_ttl_s,
            renew_s=self._timing.lease_renew_s,
            poll_s=self._timing.elect_poll_s,
        )
        self.shares = Shares(redis, pool, settings.id)
        self.term: Term | None = None

    def _send(self, worker: Worker, command: pb.ControlCommand) -> bool:
        return self.registry.send(worker, command)

    def _heard_role(self, worker: Worker, result: pb.RoleResult) -> None:
        self.actuator.heard(worker, result)

    async def run(self) -> None:
        """Serve until cancelled, then give the lease up."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.registry.run())
                tasks.create_task(self.shares.run())
                tasks.create_task(self._stand_and_lead())
        finally:
            self._looks.close()

    async def _stand_and_lead(self) -> None:
        await self.registry.discovered.wait()
        try:
            while True:
                epoch = await self.lease.acquire(
                    lambda: self.registry.highest_epoch, lambda last: self.shares.rank(without=last)
                )
                log.info("leading", pool=self.pool, scheduler_id=self._settings.id, epoch=epoch)
                try:
                    await self._lead()
                except* LeadershipLost as lost:
                    log.warning("leadership_lost", pool=self.pool, epoch=epoch, why=str(lost.exceptions[0]))
                finally:
                    self.term = None
                    self.registry.follow()
                await self.lease.release()
        finally:
            await self.lease.release()

    async def _lead(self) -> None:
        self.term = term = Term(
            self._redis,
            self.pool,
            redis_url=self._settings.redis_url,
            scheduler_id=self._settings.id,
            lease=self.lease,
            registry=self.registry,
            instruments=self._instruments,
            profile=self._profile,
            memory=self.memory,
            spans=self._spans,
            actuator=self.actuator,
            shares=self.shares,
            limits=self._limits,
            timing=self._timing,
            helm=self._helm or self._settings.helm,
            fleet=self._fleet,
        )
        try:
            await term.run()
        finally:
            term.close()


class Term:
    """One leader's term: all state about requests and the loops that drive it."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        redis_url: str,
        scheduler_id: str,
        lease: LeaderLease,
        registry: WorkerRegistry,
        instruments: Instruments,
        profile: PoolProfile,
        memory: PoolMemory,
        spans: Spans,
        actuator: Actuator,
        shares: Shares,
        limits: Limits,
        timing: Timing,
        helm: HelmSettings,
        fleet: Fleet | None = None,
    ) -> None:
        self._redis = redis
        self._pool = pool
        self._lease = lease
        self._registry = registry
        self._actuator = actuator
        self._shares = shares
        self._began_s = time.monotonic()
        self._orders = Orders(redis, pool, registry=registry, actuator=actuator)
        self._timing = timing
        self._deposed = asyncio.Event()
        self.book = Book()
        self._connection = RespConnection(redis_url, timeout_s=_REDIS_TIMEOUT_S)
        self._reader = RespConnection(redis_url, timeout_s=_BLOCK_S + _REDIS_TIMEOUT_S)
        self.outbox = Outbox(self._connection, pool)
        self.inbox = Inbox(redis, self._reader, pool, scheduler_id)
        self.num_pending = 0
        self.waiting = WaitingQueue()
        self.helm = Helm(
            redis,
            pool,
            profile=profile,
            memory=memory,
            registry=registry,
            book=self.book,
            waiting=self.waiting,
            outbox=self.outbox,
            instruments=instruments,
            settings=helm,
            actuator=actuator,
            fleet=fleet,
        )
        self.verdicts = Verdicts(
            pool,
            book=self.book,
            waiting=self.waiting,
            registry=registry,
            outbox=self.outbox,
            helm=self.helm,
            limits=limits,
            instruments=instruments,
        )
        self.retries = Retries(
            pool,
            book=self.book,
            verdicts=self.verdicts,
            budget=RetryBudget(floor_tokens=lambda: largest_kv_tokens(registry)),
            instruments=instruments,
            outbox=self.outbox,
        )
        self.dispatcher = Dispatcher(
            pool,
            book=self.book,
            waiting=self.waiting,
            verdicts=self.verdicts,
            registry=registry,
            lease=lease,
            write_ahead=WriteAhead(self._connection, pool, lease),
            outbox=self.outbox,
            router=memory.router,
            helm=self.helm,
            yields=Yields(pool, book=self.book, registry=registry, instruments=instruments),
            limits=limits,
            instruments=instruments,
            spans=spans,
        )
        self.attempts = Attempts(
            pool,
            book=self.book,
            waiting=self.waiting,
            dispatcher=self.dispatcher,
            verdicts=self.verdicts,
            registry=registry,
            hand_offs=HandOffTimers(minimum_s=timing.hand_off_min_s, factor=timing.hand_off_factor),
            retries=self.retries,
            links=Links(pool, registry.pairs),
            latency=lambda: memory.router.latency,
            stale_leader=self._deposed.set,
        )
        self.outcomes = Outcomes(
            self._connection, pool, book=self.book, verdicts=self.verdicts, period_s=timing.outcome_poll_s
        )
        self.intake = Intake(pool, self.dispatcher, self.verdicts, self.retries, self.outbox)
        self.takeover = Takeover(
            redis,
            pool,
            inbox=self.inbox,
            intake=self.intake,
            book=self.book,
            dispatcher=self.dispatcher,
            verdicts=self.verdicts,
            registry=registry,
            attempts=self.attempts,
            epoch=lease.epoch,
            stale_leader=self._deposed.set,
        )
        self._dead_gateways = DeadGateways(
            redis,
            pool,
            book=self.book,
            waiting=self.waiting,
            verdicts=self.verdicts,
            outbox=self.outbox,
            scripts=SettlementScripts(redis),
            dead_after_s=timing.gateway_dead_after_s,
        )

    async def run(self) -> None:
        """Take over, then serve. Raises LeadershipLost inside an exception group."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lease.hold())
            tasks.create_task(self._watch_deposed())
            self._registry.lead(self._lease.epoch, self.takeover)
            await self.helm.begin()
            await self._take_over()
            tasks.create_task(self.outbox.run())
            tasks.create_task(self.dispatcher.run())
            tasks.create_task(self._read_inbox())
            tasks.create_task(self.outcomes.run())
            tasks.create_task(self._actuator.run())
            tasks.create_task(self._orders.run())
            tasks.create_task(self._tick())
            tasks.create_task(self._sweep())
            tasks.create_task(self.helm.run())
            tasks.create_task(self.helm.scale())

    def close(self) -> None:
        """Close the term's connections, so that no blocked read takes another entry."""
        self._connection.close()
        self._reader.close()

    async def _watch_deposed(self) -> None:
        await self._deposed.wait()
        raise LeadershipLost("a worker has seen a higher epoch")

    def _hand_back(self) -> None:
        """Give the lease up to the process whose share the pool is, between two changes of roles."""
        # The term's own age counts too: if nobody takes the lease, this process serves on for a while.
        for_s = min(self._shares.out_of_turn_s, time.monotonic() - self._began_s)
        if for_s >= self._timing.hand_back_after_s and not self._actuator.busy:
            raise LeadershipLost("the pool is another scheduler's share")

    async def _take_over(self) -> None:
        while True:
            try:
                await self.outcomes.begin()
                await self.inbox.ensure_group()
                await self._look_for_old_data()
                await self.takeover.take_claimed(await self.inbox.claim_all())
                break
            except RedisError as error:
                log.warning("take_over_failed", pool=self._pool, error=str(error))
                await asyncio.sleep(_REDIS_RETRY_S)
        self.takeover.caught_up()

    async def _look_for_old_data(self) -> None:
        if (ago_s := await self.inbox.began_again_s()) is not None:
            self._dead_gateways.redis_began_again(ago_s)

    async def _read_inbox(self) -> None:
        now_s = asyncio.get_running_loop().time
        last_s = 0.0
        broken_off = False
        while True:
            try:
                if broken_off:
                    await self._look_for_old_data()
                    await self.takeover.take_claimed(await self.inbox.read_again())
                    broken_off = False
                entries = await self.inbox.read(_BLOCK_S)
                for entry in entries:
                    self.intake.take(entry)
                # An entry that comes alone is read at once, and so is the next. Where several come together reads
                # keep a distance, so that everything downstream goes in batches of what arrived meanwhile.
                pause_s = last_s + _READ_APART_S - now_s()
                if len(entries) > 1 and pause_s > 0:
                    await asyncio.sleep(pause_s)
                last_s = now_s()
            except RedisError as error:
                log.warning("inbox_failed", pool=self._pool, error=str(error))
                broken_off = True
                await asyncio.sleep(_REDIS_RETRY_S)

    async def _tick(self) -> None:
        while True:
            await beat(self._timing.tick_s)
            self._registry.pairs.tick(self._lease.epoch)
            self.attempts.tick()
            self.dispatcher.tick()
            self.verdicts.tick()

    async def _sweep(self) -> None:
        """Look after what no message tells: dead gateways, lost outcomes, entries read by a former leader."""
        while True:
            await beat(self._timing.gateway_poll_s)
            self._hand_back()
            try:
                await self._dead_gateways.look()
                await self._forget_settled_unheard()
                strays = await self.inbox.claim_strays()
                if strays:
                    await self.takeover.take_claimed(strays)
                self.num_pending = await self.inbox.num_pending()
            except RedisError as error:
                log.warning("sweep_failed", pool=self._pool, error=str(error))

    async def _forget_settled_unheard(self) -> None:
        due_s = time.monotonic() - _UNHEARD_AFTER_S
        ended = {
            request.entry_id: request.rid
            for request in self.book
            if (request.ended_s is not None and request.ended_s < due_s)
            or (request.asked_gateway and request.state is RequestState.DECODING)
        }
        if not ended:
            return
        for entry_id in await self.inbox.missing(list(ended)[:500]):
            self.verdicts.forget(ended[entry_id])
