"""The leader lease of one pool: one scheduler leads, the others stand by.

The epoch is taken in the same step as the lease and is higher than any that Redis or a worker ever saw,
so workers refuse what a former leader still sends.
"""

import asyncio
import time
from collections.abc import Callable
from importlib.resources import files

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat

log = structlog.get_logger()


_TURN_POLLS = 2
"""How many looks at a free lease are left to each scheduler that should rather lead."""


class LeadershipLost(Exception):
    """The lease is another's, gone, or could not be renewed in time."""


class LeaderLease:
    """One scheduler's hold on one pool's lease."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        scheduler_id: str,
        *,
        ttl_s: float = 1.5,
        renew_s: float = 0.5,
        poll_s: float = 0.2,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        folder = files("scheduler")
        self._elect = redis.register_script((folder / "elect.lua").read_text())
        self._renew = redis.register_script((folder / "renew.lua").read_text())
        self._pool = pool
        self._scheduler_id = scheduler_id
        self._ttl_s = ttl_s
        self._renew_s = renew_s
        self._poll_s = poll_s
        self._now_s = now_s
        self._valid_until_s = 0.0
        self.epoch = 0

    @property
    def value(self) -> str:
        """What the lease key holds while this scheduler leads."""
        return f"{self._scheduler_id}:{self.epoch}"

    @property
    def held(self) -> bool:
        """Whether this scheduler leads at this instant, by its own clock."""
        return self._now_s() < self._valid_until_s

    async def acquire(self, epoch_seen: Callable[[], int], rank: Callable[[str], int] = lambda _: 0) -> int:
        """Wait until this scheduler leads; return the epoch.

        Args:
            epoch_seen: the highest epoch that workers know.
            rank: how many others should lead rather than this one, given who led last; each is left some time.
        """
        away = False
        last, free_since_s = "", None
        while True:
            asked_s = self._now_s()
            wait_s = rank(last) * _TURN_POLLS * self._poll_s
            due = not wait_s or (free_since_s is not None and asked_s - free_since_s >= wait_s)
            epoch, held = 0, b""
            try:
                async with asyncio.timeout(self._ttl_s):
                    epoch, held = await self._elect(
                        keys=[keys.leader(self._pool), keys.leader_epoch(self._pool)],
                        args=[self._scheduler_id, epoch_seen(), int(self._ttl_s * 1000), int(due)],
                    )
                away = False
            except (RedisError, TimeoutError) as error:
                if not away:
                    log.warning("election_failed", pool=self._pool, error=str(error))
                away = True
            if epoch:
                self.epoch = int(epoch)
                self._valid_until_s = asked_s + self._ttl_s
                return self.epoch
            if held:
                last, free_since_s = held.decode().rpartition(":")[0], None
            elif free_since_s is None and not away:
                free_since_s = asked_s
            await asyncio.sleep(self._poll_s)

    async def hold(self) -> None:
        """Renew until cancelled. Raises LeadershipLost; `held` is false by then."""
        while True:
            await beat(self._renew_s)
            asked_s = self._now_s()
            try:
                async with asyncio.timeout(max(0.05, self._valid_until_s - asked_s)):
                    renewed = await self._renew(
                        keys=[keys.leader(self._pool)], args=[self.value, int(self._ttl_s * 1000)]
                    )
            except (RedisError, TimeoutError) as error:
                if not self.held:
                    raise LeadershipLost(f"could not renew: {error}") from error
                log.warning("lease_renewal_failed", pool=self._pool, error=str(error))
                continue
            if not renewed:
                self._valid_until_s = 0.0
                raise LeadershipLost("the lease is not ours")
            self._valid_until_s = asked_s + self._ttl_s

    async def release(self) -> None:
        """Give the lease up, so that a standby leads at once. Does nothing when it is not held."""
        self._valid_until_s = 0.0
        try:
            async with asyncio.timeout(1.0):
                await self._renew(keys=[keys.leader(self._pool)], args=[self.value, 0])
        except (RedisError, TimeoutError) as error:
            log.warning("lease_release_failed", pool=self._pool, error=str(error))
