"""The whole stack with certificates between its processes: a killed worker costs nothing, plain text gets nowhere."""

from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from contracts import keys
from contracts.credentials import Certificates, Credentials
from contracts.wire import Registration
from tests.e2e.stream_load import all_streams
from tests.processes import PEER_TOKEN, Stack
from tests.security.authority import Authority

PREFIXES = {"gateway": "GATEWAY", "scheduler": "SCHEDULER", "billing": "BILLING"}
STREAMS = 8


async def check(address: str, credentials: Credentials) -> grpc.StatusCode:
    """Ask a worker for its health with the installation's token."""
    async with credentials.channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), metadata=credentials.metadata, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def prefixed(files: dict[str, str], prefix: str = "WORKER") -> dict[str, str]:
    """Return certificates as the settings of a process."""
    return {f"{prefix}_{name.upper()}": path for name, path in files.items()}


def read(environ: dict[str, str]) -> Certificates:
    """Return the certificates that a worker's settings name."""
    ca, cert, key = (Path(environ[f"WORKER_TLS_{name}"]).read_bytes() for name in ("CA", "CERT", "KEY"))
    return Certificates(ca=ca, cert=cert, key=key)


@pytest.fixture
def certified(stack: Stack, stack_folder: Path) -> Stack:
    """The stack with a second decode worker, and a certificate of one authority for each process."""
    authority = Authority(stack_folder / "certificates")
    stack.add_worker("decode-1", role="decode", environ={"WORKER_STEP_MS": "5"})
    for name in stack.names:
        stack.environ(name).update(prefixed(authority.sign(name), PREFIXES.get(name, "WORKER")))
    return stack


@pytest.mark.e2e
async def test_streams_outlive_a_worker_on_links_with_certificates(certified: Stack, redis: Redis) -> None:
    stack = certified
    stack.start()
    await stack.ready()
    whole = await all_streams(stack, streams=STREAMS)
    assert {finish for _, finish in whole} == {"length"}

    async def kill() -> None:
        stack.kill("decode-0")

    assert await all_streams(stack, kill, streams=STREAMS) == whole

    raw = await redis.get(keys.worker_lease("tiny", "decode-1"))
    assert raw is not None
    address = msgspec.msgpack.decode(raw, type=Registration).address
    ours = read(stack.environ("decode-1"))
    stranger = read(prefixed(Authority(stack.folder / "strangers", "another authority").sign("stranger")))
    forger = msgspec.structs.replace(stranger, ca=ours.ca)  # knows our authority, and has no certificate of it
    assert await check(address, Credentials(token=PEER_TOKEN, certificates=ours)) is grpc.StatusCode.OK
    for certificates in (None, stranger, forger):
        refused = await check(address, Credentials(token=PEER_TOKEN, certificates=certificates))
        assert refused is grpc.StatusCode.UNAVAILABLE
