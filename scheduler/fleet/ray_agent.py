"""`python -m scheduler.fleet.ray_agent`: connects to a Ray cluster and answers schedulers at a Unix socket.

It runs beside a scheduler, in an environment that has Ray (requirements/ray.txt). It keeps nothing: what it is asked
about it reads from the cluster, so it may end and start again at any time, and each scheduler has one of its own.
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

from contracts.environment import SettingsError, from_env
from observability.telemetry import configure_logging
from scheduler.fleet.agent import serve_fleet
from scheduler.fleet.launch import Launch
from scheduler.fleet.ray import NAMESPACE, ZONE_LABEL, RayFleet

log = structlog.get_logger()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent, read from `RAYFLEET_*`: variables that begin with RAY_ are Ray's own."""

    socket: Path  # where schedulers ask, their SCHEDULER_FLEET_ADDRESS; its folder is closed to other users
    launches: Path  # JSON object: pool -> scheduler.fleet.launch.Launch
    address: str = "auto"  # of the cluster's head, host:port
    logs: str = "/tmp/pdgate-workers"  # noqa: S108 - folder of the workers' output on every machine
    zone_label: str = ZONE_LABEL  # label of machines that says their zone
    log_level: str = "INFO"
    log_json: bool = True


def read_launches(file: Path) -> dict[str, Launch]:
    """Return how each pool's workers are started. Raises SettingsError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Launch])
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"RAYFLEET_LAUNCHES: {file}: {error}") from None


async def serve(settings: Settings, ray: Any) -> None:
    """Answer until SIGTERM or SIGINT."""
    fleet = RayFleet(ray, read_launches(settings.launches), logs=settings.logs, zone_label=settings.zone_label)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serve_fleet(fleet, settings.socket):
        log.info("ray_agent_started", socket=str(settings.socket), cluster=settings.address)
        await stop.wait()
    log.info("ray_agent_stopped")


def main() -> None:
    """Connect, then serve; without Ray or its cluster end with one line."""
    settings = from_env(Settings, "RAYFLEET_", os.environ)
    configure_logging("ray_agent", level=settings.log_level, json=settings.log_json)
    read_launches(settings.launches)
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        sys.exit(f"ray_agent: {error}: install requirements/ray.txt")
    try:
        ray.init(address=settings.address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, TimeoutError, RuntimeError) as error:
        sys.exit(f"RAYFLEET_ADDRESS: {settings.address}: {error}")
    try:
        asyncio.run(serve(settings, ray))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
