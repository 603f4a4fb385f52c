"""Workers of models that were added while the stack runs: started and stopped as `contracts.additions` says."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from redis.exceptions import RedisError

from contracts.additions import AddedModel, read_added
from contracts.resp import redis_client
from pdgate.roster import Roster
from pdgate.supervisor import Supervisor

_LOOK_S: Final = 1.0


class AddedWorkers:
    """Keeps the workers that added models ask for. `run` until cancelled."""

    def __init__(
        self,
        roster: Roster,
        supervisor: Supervisor,
        redis_url: str,
        extra_env: Mapping[str, str],
        *,
        found: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`found`: called when workers were added, whose metrics are to be scraped too."""
        self._roster = roster
        self._supervisor = supervisor
        self._redis_url = redis_url
        self._extra_env = extra_env
        self._found = found
        self._say = say
        self._running: dict[str, AddedModel] = {}

    async def run(self) -> None:
        """Look again and again, however long Redis is away."""
        redis = redis_client(self._redis_url)
        try:
            while True:
                try:
                    added = await read_added(redis)
                except (RedisError, OSError, TimeoutError, msgspec.MsgspecError):
                    added = None
                if added is not None:
                    self._follow({one.name: one for one in added})
                await asyncio.sleep(_LOOK_S)
        finally:
            await redis.aclose()

    def _follow(self, added: Mapping[str, AddedModel]) -> None:
        for name, one in list(self._running.items()):
            if added.get(name) != one:
                self._say(f"The model {name} was removed: stopping its workers.")
                for worker in one.workers:
                    self._supervisor.drop(worker)
                del self._running[name]
        for name, one in added.items():
            ended = all(self._supervisor.pid(worker) is None for worker in one.workers)  # those of an earlier life
            if name not in self._running and ended:
                specs = self._roster.added_workers(one, self._extra_env)
                self._say(f"The model {name} was added: starting {len(specs)} workers.")
                for spec in specs:
                    self._supervisor.keep(spec)
                self._running[name] = one
                self._found()
