"""The Control streams: what schedulers command and what they are told.

Fences: every Submit, Probe, SetRole, Drain and Sleep carries its leader's epoch. A lower one than the highest ever
seen is refused; a higher one raises the mark. Aborts and Settled count only on a stream whose Hello
is not below the mark. Epoch 0 is a standby: it gets the inventory and the status, nothing else.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog

from contracts.identity import rid_from_bytes
from contracts.lifecycle import HandOff, WorkerState
from contracts.parsing import parsing_from_pb
from contracts.v1 import worker_pb2 as pb
from contracts.wire import (
    PHASE_FROM_PB,
    PHASE_TO_PB,
    ROLE_FROM_PB,
    ROLE_TO_PB,
    VERSION,
    attempt_from_pb,
    attempt_to_pb,
    sampling_from_pb,
)
from workers.assignments import Assignments
from workers.condition import Condition
from workers.engine import Job, Refusal
from workers.kv_table import KvTable
from workers.roles import RoleSwitch
from workers.sleep import Sleep
from workers.trials import Probes

log = structlog.get_logger()

MAX_QUEUED_REPORTS = 20_000
COALESCE_S = 0.004
"""How far apart reports leave under load. Tokens do not go this way."""
END_WITHIN_S = 0.005
"""How long an end may wait for company: it frees the worker's slot in the scheduler's account, no more."""
END_WITHIN_WITH_ROOM_S = 0.1
"""The same for an end while the worker has plenty of room, for which nobody waits: it goes with the next status."""
CONFIRM_WITHIN_S = 0.1
"""How long news may wait that changes nothing by itself."""
COMPANY = 32
"""Reports that wait are sent when they are so many: about ten requests that the scheduler still counts as running."""


class _Stream:
    """Reports for one scheduler process, in order; of Status only the newest is kept.

    A report object belongs to one stream: coalescing changes it.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None  # None until Hello
        self.closed = False
        self._reports: deque[pb.ControlReport] = deque()
        self._status: pb.Status | None = None
        self._due = False  # something waits that must leave at once
        self._timer: asyncio.TimerHandle | None = None  # for what may wait a little
        self._wake = asyncio.Event()
        self._now_s = asyncio.get_running_loop().time
        self._sent_s = 0.0

    def report(self, report: pb.ControlReport, *, within_s: float = 0.0) -> None:
        """Queue a report that must leave within `within_s`, with whatever else waits then; sooner when much waits.

        A peer that does not read is cut off; it reconnects and asks for the inventory.
        """
        if len(self._reports) >= MAX_QUEUED_REPORTS:
            self.close()
            return
        self._reports.append(report)
        if not within_s or len(self._reports) >= COMPANY:
            self._flush()
        elif self._timer is None or self._timer.when() > self._now_s() + within_s:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(within_s, self._flush)

    def _flush(self) -> None:
        self._stop_timer()
        self._due = True
        self._wake.set()

    def status(self, status: pb.Status) -> None:
        """Replace the status that waits to be sent."""
        self._status = status
        self._flush()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """End the stream after the current write."""
        self._stop_timer()
        self.closed = True
        self._wake.set()

    async def next(self) -> pb.ControlReport | None:
        """Wait for what is to be sent next; None when the stream is closed.

        An idle stream sends at once, a busy one at most every `COALESCE_S`.
        """
        while not self.closed:
            if not self._due:
                self._wake.clear()
                await self._wake.wait()
                continue
            wait_s = self._sent_s + COALESCE_S - self._now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._sent_s = self._now_s()
            return self._take()
        return None

    def _take(self) -> pb.ControlReport:
        """Return everything that waits as one message: the first report, the others in `also`."""
        self._due = False
        self._stop_timer()  # what it was set for leaves now
        reports = list(self._reports)
        self._reports.clear()
        if self._status is not None:
            reports.append(pb.ControlReport(status=self._status))
            self._status = None
        first = reports[0]
        first.also.extend(reports[1:])
        return first


class Control:
    """All Control streams of one worker."""

    def __init__(
        self,
        condition: Condition,
        assignments: Assignments,
        roles: RoleSwitch,
        probes: Probes,
        kv: KvTable,
        sleep: Sleep,
    ) -> None:
        self._condition = condition
        self._assignments = assignments
        self._roles = roles
        self._probes = probes
        self._kv = kv
        self._sleep = sleep
        self._streams: set[_Stream] = set()

    # -- to the schedulers ---------------------------------------------------------------------------

    @property
    def has_leader(self) -> bool:
        """Whether anybody hears `tell_leaders`."""
        return any(stream.epoch for stream in self._streams)

    def tell_leaders(self, report: pb.ControlReport, *, within_s: float = 0.0) -> None:
        """Send a report to every stream that may lead."""
        leaders = [stream for stream in self._streams if stream.epoch]
        for stream in leaders:
            own = report
            if len(leaders) > 1:
                own = pb.ControlReport()
                own.CopyFrom(report)
            stream.report(own, within_s=within_s)

    def tell_status(self, status: pb.Status) -> None:
        """Send the status to every stream, standbys included."""
        for stream in self._streams:
            if stream.epoch is not None:
                stream.status(status)

    # -- one stream ------------------------------------------------------------------------------------

    async def serve(self, commands: AsyncIterator[pb.ControlCommand], context: Any) -> None:
        """Serve one Control call until either side ends it."""
        stream = _Stream()
        self._streams.add(stream)
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(commands, stream))
                while (report := await stream.next()) is not None:
                    await context.write(report)
                reading.cancel()
        finally:
            self._streams.discard(stream)

    async def _read(self, commands: AsyncIterator[pb.ControlCommand], stream: _Stream) -> None:
        try:
            async for command in commands:
                self._obey(command, stream)
                for further in command.also:
                    self._obey(further, stream)
        finally:
            stream.close()

    def _obey(self, command: pb.ControlCommand, stream: _Stream) -> None:
        kind = command.WhichOneof("command")
        if kind == "hello":
            self._greet(command.hello, stream)
        elif kind == "submit":
            self._submit(command.submit, stream)
        elif kind == "probe":
            self._probe(command.probe.submit, stream)
        elif kind == "set_role":
            self._set_role(command.set_role, stream)
        elif kind in ("drain", "sleep"):
            self._rest(command)
        elif not stream.epoch or stream.epoch < self._condition.leader_epoch:
            log.warning("command_of_no_leader_ignored", command=kind, epoch=stream.epoch)
        elif kind == "abort":
            abort = command.abort
            self._assignments.abort(attempt_from_pb(abort.id), all_samples=abort.all_samples, reason=abort.reason)
        elif kind == "kv_resync":
            self._kv.say_again()
        elif kind == "settled":
            self._assignments.finals.settle(rid_from_bytes(command.settled.rid))

    def _greet(self, hello: pb.Hello, stream: _Stream) -> None:
        stream.epoch = hello.leader_epoch
        condition = self._condition
        condition.leader_epoch = max(condition.leader_epoch, hello.leader_epoch)
        running = [
            pb.Running(
                id=attempt_to_pb(a.job.attempt),
                phase=PHASE_TO_PB[a.job.phase],
                gateway_id=a.job.gateway_id,
                bootstrap_room=a.job.bootstrap_room,
            )
            for a in self._assignments
        ]
        inventory = pb.Inventory(
            worker_id=condition.identity.worker_id,
            worker_epoch=condition.identity.epoch,
            leader_epoch=condition.leader_epoch,
            running=running,
            finals=self._assignments.finals.all(),
            status=condition.observe(),
            v=VERSION,
        )
        stream.report(pb.ControlReport(inventory=inventory))
        if stream.epoch:
            self._kv.say_again()

    def _submit(self, submit: pb.Submit, stream: _Stream) -> None:
        try:
            self._check_fences(submit)
            final = self._assignments.submit(job_of(submit))
        except Refusal as refusal:
            log.info("submit_rejected", code=refusal.code, message=refusal.message)
            rejected = pb.Rejected(id=submit.id, phase=submit.phase, code=refusal.code, message=refusal.message)
            stream.report(pb.ControlReport(rejected=rejected))
            return
        # Nobody waits for it: only a refusal changes what the scheduler does.
        accepted = pb.ControlReport(accepted=pb.Accepted(id=submit.id, phase=submit.phase))
        stream.report(accepted, within_s=CONFIRM_WITHIN_S)
        if final is not None:
            stream.report(pb.ControlReport(final=final))

    def _check_fences(self, submit: pb.Submit) -> None:
        condition = self._condition
        if submit.leader_epoch == 0 or submit.leader_epoch < condition.leader_epoch:
            raise Refusal("stale_leader", f"epoch {submit.leader_epoch}, highest seen {condition.leader_epoch}")
        condition.leader_epoch = submit.leader_epoch
        if submit.worker_epoch != condition.identity.epoch:
            raise Refusal("stale_worker_epoch", f"this worker's epoch is {condition.identity.epoch}")
        if condition.state is WorkerState.DRAINING:
            raise Refusal("draining", "the worker drains")
        if condition.state is not WorkerState.READY:
            raise Refusal("unhealthy", f"the worker is {condition.state}")

    def _probe(self, submit: pb.Submit, stream: _Stream) -> None:
        try:
            self._check_fences(submit)
            job = job_of(submit)
            self._assignments.check_phase(job)
            self._probes.start(job)
        except Refusal as refusal:
            result = pb.ProbeResult(id=submit.id, phase=submit.phase, error=f"{refusal.code}: {refusal.message}")
            stream.report(pb.ControlReport(probe_result=result))

    def _set_role(self, command: pb.SetRole, stream: _Stream) -> None:
        def report(result: pb.RoleResult) -> None:
            if not stream.closed:
                stream.report(pb.ControlReport(role_result=result))

        condition = self._condition
        role = ROLE_FROM_PB.get(command.role)
        if role is None or not 0 < command.leader_epoch >= condition.leader_epoch:
            message = "stale leader" if role is not None else f"unknown role {command.role}"
            epoch = condition.identity.epoch
            report(pb.RoleResult(role=ROLE_TO_PB[condition.role], worker_epoch=epoch, message=message))
            return
        condition.leader_epoch = command.leader_epoch
        self._roles.ask(role, report)
        if condition.state is WorkerState.DRAINING:
            self._probes.end_all()

    def _rest(self, command: pb.ControlCommand) -> None:
        if command.HasField("drain"):
            self._drain(command.drain)
        else:
            self._lull(command.sleep)

    def _drain(self, drain: pb.Drain) -> None:
        condition = self._condition
        if not 0 < drain.leader_epoch >= condition.leader_epoch:
            log.warning("drain_of_no_leader_ignored", epoch=drain.leader_epoch)
            return
        condition.leader_epoch = drain.leader_epoch
        if self._sleep.wanted:
            return  # it is woken by Sleep
        if drain.on and condition.state is WorkerState.READY:
            condition.move(WorkerState.DRAINING)
        elif not drain.on and condition.state is WorkerState.DRAINING:
            self._roles.call_off("called off")
            if not self._roles.busy:
                condition.move(WorkerState.READY)

    def _lull(self, sleep: pb.Sleep) -> None:
        condition = self._condition
        if not 0 < sleep.leader_epoch >= condition.leader_epoch:
            log.warning("sleep_of_no_leader_ignored", epoch=sleep.leader_epoch)
            return
        condition.leader_epoch = sleep.leader_epoch
        if not sleep.on or not self._roles.busy:
            self._sleep.ask(on=sleep.on)


def job_of(submit: pb.Submit) -> Job:
    """Return the job in a submit, or raise Refusal when it makes no sense."""
    phase = PHASE_FROM_PB.get(submit.phase)
    if phase is None:
        raise Refusal("bad_request", f"unknown phase {submit.phase}")
    if len(submit.id.rid) != 16 or not 1 <= submit.id.attempt <= 99 or submit.id.sample > 999:
        raise Refusal("bad_request", "malformed attempt id")
    if not submit.prompt or len(submit.prompt) % 4 or len(submit.delivered) % 4:
        raise Refusal("bad_request", "prompt and delivered are packed u32, and the prompt is not empty")
    if submit.sampling.max_tokens < 1:
        raise Refusal("bad_request", "max_tokens must be at least 1")
    try:
        hand_off = HandOff(submit.hand_off) if submit.hand_off else None
    except ValueError:
        raise Refusal("bad_request", f"unknown hand-off {submit.hand_off!r}") from None
    try:
        sampling = sampling_from_pb(submit.sampling)
        parsing = parsing_from_pb(submit.parsing) if submit.HasField("parsing") else None
    except msgspec.ValidationError as error:
        raise Refusal("bad_request", str(error)) from None
    return Job(
        attempt=attempt_from_pb(submit.id),
        phase=phase,
        gateway_id=submit.gateway_id,
        deadline_unix_ms=submit.deadline_unix_ms,
        prompt=submit.prompt,
        sampling=sampling,
        hand_off=hand_off,
        bootstrap_host=submit.bootstrap_host,
        bootstrap_port=submit.bootstrap_port,
        bootstrap_room=submit.bootstrap_room,
        cache_salt=submit.cache_salt,
        adapter=submit.adapter,
        parsing=parsing,
        traceparent=submit.traceparent,
        delivered=submit.delivered,
        delivered_chars=submit.delivered_chars,
        payer=submit.payer,
        prompt_only=submit.prompt_only,
        link=submit.link,
        placed=submit.placed,
    )
