"""The stack's databases: taken from REDIS_URL and DATABASE_URL, or embedded and kept running."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pdgate.children import Children
from pdgate.layout import Layout
from pdgate.services import Service, ServiceError, start_postgres, start_valkey

_LOOK_EVERY_S: Final = 0.5
_RETRY_S: Final = 2.0
_STOP_S: Final = 1.0


class Servers:
    """Starts Valkey and PostgreSQL in threads of their own, which live as long as the stack.

    The threads matter: the kernel ends an embedded server when the thread that started it ends.
    """

    def __init__(self, layout: Layout, children: Children, environ: Mapping[str, str]) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="servers")
        self._services: dict[str, Service] = {}
        spawn = children.spawn_server
        self._given: dict[str, str] = {}
        self._starters: dict[str, Callable[[], Service]] = {}
        if url := environ.get("REDIS_URL"):
            self._given["valkey"] = url
        else:
            self._starters["valkey"] = lambda: start_valkey(layout.data / "valkey", start=spawn)
        if url := environ.get("DATABASE_URL"):
            self._given["postgres"] = url
        else:
            self._starters["postgres"] = lambda: start_postgres(layout.data / "pg", start=spawn)

    @property
    def embedded(self) -> bool:
        """Whether both are this stack's own."""
        return not self._given

    @property
    def redis_url(self) -> str:
        """URL of Valkey or Redis."""
        return self._given.get("valkey") or self._services["valkey"].url

    @property
    def database_url(self) -> str:
        """URL of PostgreSQL."""
        return self._given.get("postgres") or self._services["postgres"].url

    async def start(self) -> None:
        """Start both side by side. Raises ServiceError."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._starters:
                tasks.create_task(self._start(name))

    async def _start(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self._services[name] = await loop.run_in_executor(self._threads, self._starters[name])

    async def call(self, function: Callable[[], None]) -> None:
        """Run blocking work of the start, migrations for instance, in one of the threads."""
        await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def keep(self, say: Callable[[str], None]) -> None:
        """Start a server again when it dies; runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for name, service in list(self._services.items()):
                code = service.process.poll()
                if code is None:
                    continue
                say(f"{name} ended (exit code {code}); starting it again")
                try:
                    await self._start(name)
                except ServiceError as error:
                    say(f"{name}: {error}")
                    await asyncio.sleep(_RETRY_S)

    def stop(self) -> None:
        """Stop both cleanly, or kill what takes too long."""
        deadline = time.monotonic() + _STOP_S
        for service in self._services.values():
            service.process.send_signal(service.stop_signal)
        for service in self._services.values():
            service.stop(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the threads; call when no server runs any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)
