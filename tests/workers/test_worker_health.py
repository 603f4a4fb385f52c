"""Health is progress: a long prefill lives, a hung engine behind an answering port does not."""

import asyncio

import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.lifecycle import Role
from contracts.perf import PrefillCost
from contracts.v1 import worker_pb2 as pb
from tests.workers.peers import FAST, Worker, new_attempt, running_worker, submit_of, unified_bench
from workers.control import job_of
from workers.engine import EngineLoad
from workers.engines.faults import HANG
from workers.roles import RestartNeeded

PROMPT = list(range(40))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(worker: Worker, service: str) -> int:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def test_a_worker_is_healthy_in_its_own_role_only():
    async with running_worker(Role.DECODE) as worker:
        services = ("", "pdgate.v1.Worker", "pdgate.ready", "pdgate.decode", "pdgate.prefill", "pdgate.unified")
        answers = [await check(worker, service) for service in services]
    assert answers == [SERVING, SERVING, SERVING, SERVING, NOT_SERVING, NOT_SERVING]


async def test_watchers_hear_of_a_hung_engine_and_of_its_recovery_although_the_port_answers():
    async with unified_bench(min_grace_s=0.2) as bench:
        bench.worker.server.condition._grace_s = 0.2
        async with grpc.aio.insecure_channel(bench.worker.address) as channel, asyncio.timeout(20):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            seen = [(await watch.read()).status]
            await bench.submit(PROMPT, max_tokens=1500)
            await bench.gateway.until(lambda: len(bench.gateway.batches) >= 3)
            bench.worker.faults.on.add(HANG)
            seen.append((await watch.read()).status)
            bench.worker.faults.on.clear()
            seen.append((await watch.read()).status)
            watch.cancel()
    assert seen == [SERVING, NOT_SERVING, SERVING]


async def test_an_engine_that_knows_that_it_can_do_nothing_makes_its_worker_unhealthy_at_once(monkeypatch):
    """A server behind the http engine that does not answer: nothing runs, so no lack of progress would tell."""
    async with unified_bench() as bench:
        monkeypatch.setattr(bench.worker.engine, "load", lambda: EngineLoad(out_of_service=True))
        await bench.leader.next_of("status", lambda s: s.state == pb.WORKER_STATE_UNHEALTHY)
        monkeypatch.undo()
        seen = len(bench.leader.of("status"))
        statuses = bench.leader.of
        await bench.leader.next_of(
            "status", lambda s: statuses("status").index(s) >= seen and s.state == pb.WORKER_STATE_READY
        )


async def test_a_long_prefill_does_not_look_dead():
    slow = msgspec.structs.replace(FAST, prefill=PrefillCost(fixed_ms=2_500.0, per_token_ms=0.0))
    async with unified_bench(slow, min_grace_s=0.2) as bench:
        attempt = await bench.submit(PROMPT, max_tokens=1)
        await bench.gateway.answer(attempt)
        statuses = bench.leader.of("status")
    # One prompt is one step here: its time is the engine's own slowest step, of which the worker grants twice.
    assert len(statuses) > 10
    assert all(status.progressing for status in statuses)


async def test_a_worker_whose_engine_stays_hung_asks_to_be_started_again():
    with pytest.RaisesGroup(RestartNeeded, flatten_subgroups=True):
        async with running_worker(Role.UNIFIED, min_grace_s=0.2, may_restart=True) as worker, asyncio.timeout(20):
            worker.server.condition._grace_s = 0.2
            worker.faults.on.add(HANG)
            worker.server.assignments.submit(new_job(worker))
            await asyncio.Event().wait()


def new_job(worker: Worker):
    return job_of(submit_of(worker, PROMPT, attempt=new_attempt(), max_tokens=100))
