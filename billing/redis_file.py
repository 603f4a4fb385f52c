"""Keeps Redis' append-only file whole after its disk was full.

When a write is cut short, the server truncates the file back to its last whole command. Valkey 9.1.2 forgets where that
is once it has copied another server: after a promotion and a full disk its file is damaged in the middle although
`INFO` says `ok`, and it does not start again. What it holds in memory is whole, so a rewrite from memory mends it.
"""

from typing import Final

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

log: Final = structlog.get_logger()


class AppendOnlyFile:
    """Asks for a rewrite once writes succeed again."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.failing = False
        """The last write failed: the server refuses every change until it succeeds."""
        self._to_rewrite = False

    async def look(self) -> None:
        """Read the state of the file. Raises redis.exceptions.RedisError when the server cannot tell."""
        state = await self._redis.info("persistence")
        failing = bool(state.get("aof_enabled")) and state.get("aof_last_write_status") != "ok"
        if failing and not self.failing:
            log.error("redis_file_failing", hint="its disk is full or broken: no request is accepted until it has room")
        self.failing = failing
        self._to_rewrite |= failing
        if self._to_rewrite and not failing:
            await self._rewrite()

    async def _rewrite(self) -> None:
        try:
            await self._redis.bgrewriteaof()
        except ResponseError as error:  # one is under way, which may have begun too early; or the user may not
            log.warning("redis_file_not_rewritten", error=str(error))
        else:
            self._to_rewrite = False
            log.info("redis_file_rewritten")
