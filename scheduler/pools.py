"""The pools that one scheduler process serves: those of the catalogue's file, and those of models added since.

Every few seconds the process reads which models were added (`contracts.additions`). A pool that is new gets a
PoolScheduler, one that is gone loses it: its lease is given up, and what still runs there ends on its worker.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts.additions import LiveModels, read_added
from contracts.beat import beat
from contracts.catalog import Catalog
from scheduler.pool import PoolScheduler

log = structlog.get_logger()

LOOK_S: Final = 2.0


class Pools(Iterable[PoolScheduler]):
    """The pools of one process, as they are now. `run` until cancelled."""

    def __init__(
        self,
        redis: Redis,
        catalog: Catalog,
        models: LiveModels,
        *,
        only: Sequence[str],
        make: Callable[[str], PoolScheduler],
        look_s: float = LOOK_S,
    ) -> None:
        """Serve nothing yet.

        Args:
            redis: where added models are read.
            catalog: whose models are `models`.
            models: the part of the catalogue that grows.
            only: the pools that this process serves at all; empty = every one.
            make: builds the scheduler of a pool.
            look_s: between two looks.
        """
        self._redis = redis
        self._catalog = catalog
        self._models = models
        self._only = only
        self._make = make
        self._look_s = look_s
        self._pools: Mapping[str, PoolScheduler] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self.looks = 0
        """How often it was read which models were added."""

    def __iter__(self) -> Iterator[PoolScheduler]:
        return iter(self._pools.values())

    async def run(self) -> None:
        """Serve every pool, and follow which there are."""
        async with asyncio.TaskGroup() as tasks:
            self._follow(tasks)
            while True:
                await beat(self._look_s)
                try:
                    added = await read_added(self._redis)
                except (RedisError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                    log.warning("models_not_read", error=str(error))
                    continue
                self.looks += 1
                if added is None:  # a Redis that lost its data, until a gateway has written them again
                    continue
                self._models.take(added)
                self._follow(tasks)

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        wanted = [pool for pool in self._catalog.pools if not self._only or pool in self._only]
        for pool in self._pools.keys() - set(wanted):
            self._running.pop(pool).cancel()
            log.info("pool_left", pool=pool)
        self._pools = {pool: self._pools.get(pool) or self._make(pool) for pool in wanted}
        for pool, scheduler in self._pools.items():
            if pool not in self._running:
                self._running[pool] = tasks.create_task(scheduler.run(), name=pool)
                log.info("pool_taken_up", pool=pool)
