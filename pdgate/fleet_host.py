"""The stack's own fleet: workers that come and go by demand, under the same nets as all its processes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from pdgate.children import Children, ChildSpec
from pdgate.scraping import Scraping
from pdgate.supervisor import STAGE_BEHIND
from scheduler.fleet.agent import serve_fleet
from scheduler.fleet.launch import Launch
from scheduler.fleet.local import LocalFleet

_STOP_GRACE_S: Final = 1.0


class FleetSpawner:
    """Starts workers as children of the stack, each with a port for its metrics."""

    def __init__(self, children: Children, scraping: Scraping, rules: Path) -> None:
        """`rules`: the folder of Prometheus' rules, for the files that name the ports."""
        self._children = children
        self._scraping = scraping
        self._rules = rules
        self._listens: dict[str, str] = {}

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: Path,  # noqa: ARG002 - the stack's logs are in one folder, under the same name
    ) -> asyncio.subprocess.Process:
        """See scheduler.fleet.local.Spawner."""
        if name not in self._listens:
            self._listens[name] = self._scraping.listen(name, "pdgate-worker")
            self._scraping.write(self._rules)
        named = {**env, "WORKER_METRICS_LISTEN": self._listens[name]}
        return await self._children.spawn(ChildSpec(name=name, argv=argv, env=named, stage=STAGE_BEHIND))

    async def finish(self, process: asyncio.subprocess.Process) -> int:
        """See scheduler.fleet.local.Spawner."""
        return await self._children.finish(process)


class FleetHost:
    """Runs the fleet, once it is known how workers are started, and takes it down before the stack's servers."""

    def __init__(self, tasks: asyncio.TaskGroup, children: Children, socket: Path) -> None:
        self._tasks = tasks
        self._children = children
        self._socket = socket
        self._serving = AsyncExitStack()
        self._fleet: LocalFleet | None = None

    async def open(self, launches: Mapping[str, Launch], scraping: Scraping, rules: Path) -> None:
        """Let the scheduler start workers of these pools; with none there is nothing to open."""
        if not launches:
            return
        spawner = FleetSpawner(self._children, scraping, rules)
        self._fleet = LocalFleet(self._tasks, launches, logs=self._children.logs, spawner=spawner)
        await self._serving.enter_async_context(serve_fleet(self._fleet, self._socket))

    async def close(self, then: Callable[[], Awaitable[None]]) -> None:
        """Take no more orders, do `then`, and stop every worker."""
        await self._serving.aclose()
        await then()
        if self._fleet is not None:
            await self._fleet.close(grace_s=_STOP_GRACE_S)

    def kill(self) -> None:
        """Kill every worker at once."""
        if self._fleet is not None:
            self._fleet.kill()
