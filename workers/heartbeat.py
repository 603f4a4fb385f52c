"""The worker's registration: a lease in Redis, renewed each second, gone three seconds after the worker.

Two processes may be given the same worker id, by mistake or because one was thought dead and was only frozen. The
lease belongs to the later life (the higher epoch): a process that finds one there stops. One that starts does not take
it from a process that is alive, but stops too, so the two never take turns however often they are started again.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec
import psutil
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts.beat import until_beat_s
from contracts.keys import pool_workers, worker_lease
from contracts.wire import Registration, encode

log = structlog.get_logger()

# KEYS: lease, workers. ARGV: registration, epoch, pid, lease ms, expiry Unix ms, forget before Unix ms, worker id.
# Returns 0 when it was written, otherwise the epoch of the later life that holds it.
_WRITE = """
local held = redis.call('GET', KEYS[1])
if held then
  local other = cmsgpack.unpack(held)
  local epoch, pid = tonumber(other['epoch']), tonumber(other['pid'])
  if epoch > tonumber(ARGV[2]) or (epoch == tonumber(ARGV[2]) and pid > tonumber(ARGV[3])) then
    return string.format('%.0f', epoch)
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[4])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[7])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[6])
return '0'
"""
_REMOVE = """
local held = redis.call('GET', KEYS[1])
if held and tonumber(cmsgpack.unpack(held)['epoch']) > tonumber(ARGV[1]) then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
return 1
"""

LEASE_MS = 3_000
FORGET_MS = 24 * 3_600_000  # names of workers that died without taking theirs out
PERIOD_S = 1.0
CLAIM_S = 4.0


class Fenced(Exception):
    """Another process with this worker's id is alive, and is the later one."""


class Heartbeat:
    """Keeps one registration alive. While Redis is away the worker runs on and this keeps trying."""

    def __init__(self, redis: Redis, registration: Callable[[], Registration]) -> None:
        self._redis = redis
        self._registration = registration
        self._renew = asyncio.Event()
        self._away = False
        self._write_script = redis.register_script(_WRITE)
        self._remove_script = redis.register_script(_REMOVE)

    def renew_soon(self) -> None:
        """Write the lease now instead of at the next beat: the state has changed."""
        self._renew.set()

    async def claim(self) -> None:
        """Wait until no other process has our id: one that died leaves its lease for three seconds.

        Raises:
            Fenced: another one is alive.
        """
        own = self._registration()
        lease = worker_lease(own.pool, own.worker_id)
        try:
            async with asyncio.timeout(CLAIM_S):
                while isinstance(raw := await self._redis.get(lease), bytes):
                    other = msgspec.msgpack.decode(raw, type=Registration)
                    if other.pid == own.pid or (other.node == own.node and not psutil.pid_exists(other.pid)):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise Fenced(f"worker id {own.worker_id!r} is in use by process {other.pid} on {other.node}") from None
        except (RedisError, OSError, msgspec.MsgspecError) as error:
            log.warning("claim_unchecked", error=str(error))

    async def run(self) -> None:
        """Write the lease every second until cancelled. Raises Fenced."""
        while True:
            await self._write()
            self._renew.clear()
            try:
                async with asyncio.timeout(until_beat_s(PERIOD_S)):
                    await self._renew.wait()
            except TimeoutError:
                continue

    async def remove(self) -> None:
        """Take the registration out, if it is ours: the worker stops cleanly."""
        registration = self._registration()
        try:
            async with asyncio.timeout(PERIOD_S):
                args: list[int | str] = [registration.epoch, registration.worker_id]
                await self._remove_script(keys=_keys(registration), args=args, client=self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("registration_not_removed", error=str(error))

    async def _write(self) -> None:
        registration = self._registration()
        now_ms = int(time.time() * 1000)
        args: list[bytes | int | str] = [
            encode(registration),
            registration.epoch,
            registration.pid,
            LEASE_MS,
            now_ms + LEASE_MS,
            now_ms - FORGET_MS,
            registration.worker_id,
        ]
        try:
            async with asyncio.timeout(PERIOD_S):
                holder = await self._write_script(keys=_keys(registration), args=args, client=self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                log.warning("redis_is_away", error=str(error))
            self._away = True
        else:
            if self._away:
                log.info("redis_is_back")
            self._away = False
            if int(holder):
                raise Fenced(f"worker id {registration.worker_id!r} is taken by a process with epoch {int(holder)}")


def _keys(registration: Registration) -> list[str]:
    return [worker_lease(registration.pool, registration.worker_id), pool_workers(registration.pool)]
