"""Processes of ours ask gRPC to read where a message is waited for."""

import json
import subprocess
import sys

PROGRAM = """
import asyncio, json
from pathlib import Path

from contracts.grpc_threads import use_few_threads

{ask}

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

CALLS = 200


def runs() -> int:
    tasks = [task for task in Path("/proc/self/task").iterdir() if "event_engine" in (task / "comm").read_text()]
    return sum(int((task / "schedstat").read_text().split()[2]) for task in tasks)


async def main() -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        await ask(health_pb2.HealthCheckRequest())
        before = runs()
        for _ in range(CALLS):
            await ask(health_pb2.HealthCheckRequest())
        print(json.dumps((runs() - before) / CALLS))
    await server.stop(0)


asyncio.run(main())
"""


def run_with(ask: str) -> tuple[float, str]:
    """Return how often the event engine's threads ran a call, and what gRPC said."""
    argv = [sys.executable, "-c", PROGRAM.format(ask=ask)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_version_of_grpc_that_is_pinned_knows_what_it_is_asked_for():
    runs_a_call, said = run_with("use_few_threads()")
    assert "Unknown experiment" not in said
    assert runs_a_call < 1, "without being asked it is about ten"


def test_what_the_environment_says_of_experiments_stands():
    _, said = run_with('import os; os.environ["GRPC_EXPERIMENTS"] = "no_such_thing"; use_few_threads()')
    assert "Unknown experiment: no_such_thing" in said
