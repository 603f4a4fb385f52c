"""`python -m workers.probe [SERVICE]`: ask this machine's worker how it is, with what its own environment shows.

For probes that run a command, where the worker wants a token or a certificate. Exit 0: the service is well; 1: it is
not, or does not answer. WORKER_LISTEN names the port; a worker with a free port cannot be asked.
"""

import asyncio
import os
import sys
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.credentials import Credentials, credentials_of
from contracts.environment import from_env, host_and_port
from workers.health import READY
from workers.settings import Settings

_ANSWER_S: Final = 2.0


async def ask(address: str, credentials: Credentials, service: str) -> bool:
    """Return whether the worker at `host:port` says that a service of it is well."""
    async with credentials.channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await stub.Check(asked, timeout=_ANSWER_S, metadata=credentials.metadata)
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"{address}: {error.code().name}: {error.details()}\n")
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    """Ask once."""
    service = sys.argv[1] if len(sys.argv) > 1 else READY
    settings = from_env(Settings, "WORKER_", os.environ)
    credentials = credentials_of("WORKER_", settings, listen=settings.listen)
    _, port = host_and_port("WORKER_LISTEN", settings.listen)
    host = settings.advertise or "127.0.0.1"
    sys.exit(0 if asyncio.run(ask(f"{host}:{port}", credentials, service)) else 1)


if __name__ == "__main__":
    main()
