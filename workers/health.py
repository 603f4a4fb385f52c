"""The standard gRPC health service (grpc.health.v1, with Watch) over a worker's own judgement.

Services:

* "" and "pdgate.v1.Worker": the process is alive and its engine makes progress. A long prefill does; a hung engine
  whose port still answers does not. For liveness probes.
* "pdgate.ready": the worker is ready in whatever role it has. For readiness probes, since roles change.
* "pdgate.prefill", "pdgate.decode", "pdgate.unified": the worker is ready in this role.
"""

from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from contracts.lifecycle import Role, WorkerState
from workers.condition import Condition

ALIVE: Final = ("", "pdgate.v1.Worker")
READY: Final = "pdgate.ready"
ROLE_SERVICE: Final = {role: f"pdgate.{role}" for role in Role}
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Keeps the service's answers true; `tell` is called every status period."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._servicer = health.aio.HealthServicer()
        self._told: dict[str, bool] = {}

    def serve(self, server: grpc.aio.Server) -> None:
        """Add the service to a gRPC server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def tell(self) -> None:
        """Tell watchers what has changed."""
        condition = self._condition
        alive = condition.progressing and condition.state not in (WorkerState.UNHEALTHY, WorkerState.STOPPED)
        now = dict.fromkeys(ALIVE, alive)
        ready = alive and condition.state is WorkerState.READY
        now[READY] = ready
        now |= {service: ready and role is condition.role for role, service in ROLE_SERVICE.items()}
        for service, serving in now.items():
            if self._told.get(service) is not serving:
                status = _SERVING if serving else _NOT_SERVING
                await self._servicer.set(service, status)
        self._told = now
