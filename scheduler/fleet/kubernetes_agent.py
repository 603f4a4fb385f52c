"""`python -m scheduler.fleet.kubernetes_agent`: answers a scheduler at a Unix socket for one Kubernetes namespace.

It runs beside a scheduler, in the same pod, in an environment that has the official client
(requirements/kubernetes.txt). It keeps nothing but the last words of workers that it stopped.
"""

import asyncio
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import structlog

from contracts.environment import from_env
from observability.telemetry import configure_logging
from scheduler.fleet.agent import serve_fleet
from scheduler.fleet.kubernetes import KubernetesFleet

log = structlog.get_logger()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent, read from `KUBEFLEET_*`."""

    socket: Path  # where the scheduler asks, its SCHEDULER_FLEET_ADDRESS; the folder is closed to other users
    namespace: str
    release: str  # of the chart, whose managed pools are the templates
    kubeconfig: str = ""  # empty = the pod's own service account
    log_level: str = "INFO"
    log_json: bool = True


async def serve(settings: Settings, aio: Any) -> None:
    """Answer until SIGTERM or SIGINT. Raises kubernetes' ConfigException without credentials."""
    if settings.kubeconfig:
        await aio.config.load_kube_config(settings.kubeconfig)
    else:
        aio.config.load_incluster_config()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with aio.client.ApiClient() as api:
        fleet = KubernetesFleet(api, namespace=settings.namespace, release=settings.release)
        async with serve_fleet(fleet, settings.socket):
            log.info("kubernetes_agent_started", socket=str(settings.socket), namespace=settings.namespace)
            await stop.wait()
    log.info("kubernetes_agent_stopped")


def main() -> None:
    """Serve; without the client or its credentials end with one line."""
    settings = from_env(Settings, "KUBEFLEET_", os.environ)
    configure_logging("kubernetes_agent", level=settings.log_level, json=settings.log_json)
    try:
        aio: Any = import_module("kubernetes.aio")
        for part in ("client", "config"):
            import_module(f"kubernetes.aio.{part}")
    except ImportError as error:
        sys.exit(f"kubernetes_agent: {error}: install requirements/kubernetes.txt")
    try:
        asyncio.run(serve(settings, aio))
    except (aio.config.ConfigException, OSError) as error:
        sys.exit(f"KUBEFLEET_KUBECONFIG: {error}")


if __name__ == "__main__":
    main()
