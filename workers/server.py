"""The gRPC server of one worker process, and the clock that drives status, deadlines and readers."""

import asyncio
import time
from typing import Any

import structlog

from contracts.beat import beat
from contracts.credentials import NOBODY_ASKED, Credentials
from contracts.lifecycle import FinishReason, Phase, Role, WorkerState
from contracts.usage import AttemptRecord, DeliveredMark
from contracts.v1 import worker_pb2 as pb
from contracts.v1 import worker_pb2_grpc
from contracts.wire import FINISH_FROM_PB, PHASE_FROM_PB, attempt_from_pb, attempt_to_pb
from observability.metrics import Instruments
from workers.accelerators import Accelerators
from workers.assignments import Assignment, Assignments, Identity
from workers.attach import Attach
from workers.condition import MIN_GRACE_S, Condition
from workers.control import CONFIRM_WITHIN_S, END_WITHIN_S, END_WITHIN_WITH_ROOM_S, Control
from workers.engine import End, Engine, Job
from workers.expert_table import ExpertTable
from workers.first_prompts import NO_PROMPTS, FirstPrompts
from workers.health import Health
from workers.kv_table import KvTable
from workers.machine import Machine
from workers.outbox import Limits
from workers.records import Recorder
from workers.roles import DRAIN_CAP_S, RestartNeeded, RoleSwitch
from workers.sleep import Sleep, Sleeper
from workers.spans import Spans
from workers.tallies import Tallies, sources
from workers.trials import Probes

log = structlog.get_logger()

STATUS_PERIOD_S = 0.1
DRAIN_S = 0.8
DRAIN_POLL_S = 0.01
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # A peer that is frozen or cut off is found in 10 s; peers may look after us the same way.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),  # pings that a busy machine held up come together: no reason to hang up
)


class _Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, control: Control, attach: Attach) -> None:
        self._control = control
        self._attach = attach

    async def Control(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 - the proto's name
        await self._control.serve(request_iterator, context)

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        await self._attach.serve(request_iterator, context)


class WorkerServer:
    """One worker: an engine, its assignments and both gRPC calls.

    `start`, then `run` in a task group until cancelled, then `stop`.
    """

    def __init__(
        self,
        identity: Identity,
        role: Role,
        engine: Engine,
        *,
        limits: Limits | None = None,
        recorder: Recorder | None = None,
        instruments: Instruments | None = None,
        spans: Spans | None = None,
        min_grace_s: float = MIN_GRACE_S,
        force_end_s: float = 10.0,
        drain_cap_s: float = DRAIN_CAP_S,
        may_restart: bool = False,
        kv: KvTable | None = None,
        experts: ExpertTable | None = None,
        accelerators: Accelerators | None = None,
        sleeper: Sleeper | None = None,
        first_prompts: FirstPrompts = NO_PROMPTS,
        credentials: Credentials = NOBODY_ASKED,
    ) -> None:
        """Build it; `may_restart`: `run` may raise RestartNeeded, since somebody starts the process again.

        With `first_prompts` it is ready once `run` has computed them.

        `sleeper`: the engine, where it can give its device's memory back.
        """
        now_s = asyncio.get_running_loop().time
        self._engine = engine
        self._role = role
        self._pool = identity.pool
        self._recorder = recorder
        self._instruments = instruments
        self._spans = spans
        self.assignments = Assignments(identity, role, engine, limits or Limits(), now_s=now_s, force_end_s=force_end_s)
        self.condition = Condition(identity, role, engine, self.assignments, now_s=now_s, min_grace_s=min_grace_s)
        self._may_restart = may_restart
        self._first_prompts = first_prompts
        self._tallies = Tallies()
        self._accelerators = accelerators
        self._machine = Machine(accelerators=accelerators)
        self.roles = RoleSwitch(
            self.condition, self.assignments, engine, now_s=now_s, drain_cap_s=drain_cap_s, may_restart=may_restart
        )
        self.probes = Probes(engine, lambda result: self._control.tell_leaders(pb.ControlReport(probe_result=result)))
        self.kv = kv if kv is not None else KvTable("")  # an empty one is falsy
        self._experts = experts or ExpertTable()
        self.condition.kv_seq = lambda: self.kv.seq
        self.sleep = Sleep(self.condition, self.assignments, sleeper)
        self._control = Control(self.condition, self.assignments, self.roles, self.probes, self.kv, self.sleep)
        self._credentials = credentials
        self._server = credentials.server(_OPTIONS)
        servicer = _Servicer(self._control, Attach(self.assignments))
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self.health = Health(self.condition)
        self.health.serve(self._server)
        self._listen_to_events()

    async def start(self, listen: str) -> str:
        """Start the engine's listeners and the server; return the real `host:port`."""
        facts = await self._engine.start(self._role)
        self.assignments.role_is_label = facts.role_is_label
        self.assignments.kv_bytes_per_token = facts.kv_bytes_per_token
        self.condition.started(facts, ready=not self._first_prompts)
        await self.health.tell()
        host = listen.rpartition(":")[0]
        bound = self._credentials.listen(self._server, listen)
        await self._server.start()
        return f"{host}:{bound}"

    async def run(self) -> None:
        """Run the engine and the status clock until cancelled.

        Raises:
            RestartNeeded: in an exception group; the engine hangs or has lost its role, or must start in another.
        """
        if self._accelerators is not None:
            self._accelerators.watch()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engine.run())
            tasks.create_task(self.roles.run())
            tasks.create_task(self.sleep.run())
            if self._first_prompts:
                tasks.create_task(self._compute_first_prompts())
            while True:
                await beat(STATUS_PERIOD_S)
                self.assignments.tick()
                self.probes.tick()
                status = self.condition.observe()
                self._tallies.fill(status)
                self._machine.fill(status)
                self._control.tell_status(status)
                await self.health.tell()
                for events in self.kv.take():
                    self._control.tell_leaders(pb.ControlReport(kv_events=events))
                if self._control.has_leader and (hits := self._experts.take()) is not None:
                    self._control.tell_leaders(pb.ControlReport(expert_hits=hits))
                if self._may_restart and self.condition.hung:
                    raise RestartNeeded(None, "the engine hangs: work is there and nothing moves")

    async def _compute_first_prompts(self) -> None:
        await self._first_prompts.run(self._engine, self._role)
        if self.condition.state is WorkerState.STARTING:  # nobody has stopped it meanwhile
            self.condition.move(WorkerState.READY)

    async def wind_down(self, within_s: float) -> None:
        """Take nothing new and let what runs end by itself, up to `within_s`. `run` must still run."""
        if within_s <= 0 or self.condition.state is not WorkerState.READY:
            return
        self.condition.move(WorkerState.DRAINING)
        for _ in range(int(within_s / DRAIN_POLL_S)):
            if self.assignments.quiet:
                return
            await asyncio.sleep(DRAIN_POLL_S)

    async def drain(self) -> None:
        """End everything that runs and give the ends up to `DRAIN_S` to get out. `run` must still run."""
        self.condition.move(WorkerState.STOPPED)
        self._control.tell_status(self.condition.observe())
        self.assignments.end_all(FinishReason.ERROR)
        self.probes.end_all()
        for _ in range(int(DRAIN_S / DRAIN_POLL_S)):
            if self.assignments.drained:
                return
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Close the server; open calls are cancelled."""
        await self._server.stop(grace=0.2)

    # -- events ----------------------------------------------------------------------------------------

    def _listen_to_events(self) -> None:
        events = self.assignments.events
        # At once: before the scheduler hears of it, it takes for granted that no token can have been streamed.
        events.prefilled = lambda done: self._control.tell_leaders(pb.ControlReport(prefill_done=done))
        events.first_token = self._first_token
        events.delivered = self._delivered
        events.ended = self._ended
        events.recorded = self._recorded
        events.closed = self._closed

    def _first_token(self, assignment: Assignment) -> None:
        """Tell the schedulers that a unified worker has computed a prompt: it may get another."""
        if assignment.job.sampling.max_tokens > 1:  # otherwise its end says so
            done = pb.PrefillDone(id=attempt_to_pb(assignment.job.attempt))
            self._control.tell_leaders(pb.ControlReport(prefill_done=done), within_s=END_WITHIN_S)

    def _ended(self, final: pb.Final) -> None:
        within_s = 0.0  # what did not end well is tried again elsewhere
        if FINISH_FROM_PB[final.reason].complete:
            within_s = END_WITHIN_WITH_ROOM_S if self.condition.has_room else END_WITHIN_S
        self._control.tell_leaders(pb.ControlReport(final=final), within_s=within_s)
        if self._instruments is None:
            return
        phase = PHASE_FROM_PB[final.phase]
        labels = {"pool": self._pool, "phase": phase.value, "reason": FINISH_FROM_PB[final.reason].value}
        self._instruments.engine_finishes.add(1, labels)

    def _closed(self, job: Job, end: End, reason: FinishReason) -> None:
        self._tallies.ended(job, end, reason)
        if self._instruments is not None:
            self._count(self._instruments, job, end)
        if self._spans is not None:
            self._spans.ended(job, end, reason, now_unix_ms=time.time() * 1000)

    def _count(self, instruments: Instruments, job: Job, end: End) -> None:
        stages = end.stages
        if stages.transfer_ms and job.phase is Phase.PREFILL:  # the sender alone knows when it began
            hand_off = job.hand_off.value if job.hand_off is not None else ""
            instruments.transfer(stages.transfer_ms, pool=self._pool, hand_off=hand_off, link=job.link)
        if job.computes:
            for source, tokens in sources(end.counts):
                if tokens:
                    labels = {"pool": self._pool, "phase": job.phase.value, "source": source}
                    instruments.prompt_tokens.add(tokens, labels)

    def _delivered(self, done: pb.Delivered) -> None:
        self._control.tell_leaders(pb.ControlReport(delivered=done), within_s=CONFIRM_WITHIN_S)
        if self._recorder is not None:
            attempt = attempt_from_pb(done.id)
            self._recorder.mark(DeliveredMark(delivered=attempt.rid, attempt=attempt.attempt, sample=attempt.sample))

    def _recorded(self, record: AttemptRecord) -> None:
        if self._recorder is not None:
            self._recorder.offer(record)
