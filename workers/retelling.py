"""Says again what Redis may have lost: the end of the journal, whenever Redis begins another life.

Redis answers before its file is on disk, so a kill, a power cut or the promotion of a replica may cost the last seconds
of what it acknowledged: reservations, settlements, and these counts. The journal has what ended here, who pays, and
which answers their gateway has. Its last minute is written to a stream of its own; billing restores what is missing
from it (`billing/retold.py`) and drops the rest.

That is done, too, when a worker starts: after a power cut it does not know which life Redis was in before.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from contracts.beat import beat
from contracts.keys import retold
from contracts.wire import FIELD
from workers.records import Journal

log = structlog.get_logger()

PERIOD_S: Final = 1.0
RETOLD_MS: Final = 60_000
"""How much is said again, back from the last end in the journal."""

OLDEST_MS: Final = 86_400_000
TAIL_BYTES: Final = 8 * 2**20
LINES_PER_ENTRY: Final = 100
MAX_STREAM_LENGTH: Final = 100_000
_TIMEOUT_S: Final = 5.0


class _Line(msgspec.Struct):
    """What is read of a line: a record has a `rid`, a mark `delivered`."""

    rid: str = ""
    delivered: str = ""
    ended_unix_ms: int = 0


_decoder: Final = msgspec.json.Decoder(_Line)


class Retelling:
    """Watches for another life of Redis. `run` until cancelled."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        journal: Journal,
        *,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._redis = redis
        self._stream = retold(pool)
        self._journal = journal
        self._now_ms = now_ms
        self._life = ""  # of the server that was told

    async def run(self) -> None:
        """Look every `PERIOD_S`."""
        while True:
            try:
                await self.look()
            except ResponseError as error:  # a server that does not say who it is: nothing can be seen there
                log.warning("redis_life_unknown", error=str(error))
                return
            except (RedisError, OSError):  # away: whatever answers next may be another life
                pass
            await beat(PERIOD_S)

    async def look(self) -> int:
        """Say the last minute again if this is another life of Redis; return how many lines that were.

        Raises RedisError, OSError.
        """
        async with asyncio.timeout(_TIMEOUT_S):
            life = str((await self._redis.info("server"))["run_id"])
        if life == self._life:
            return 0
        tail = await asyncio.to_thread(self._journal.tail, TAIL_BYTES)
        lines = last_minute(tail, now_ms=self._now_ms())
        async with asyncio.timeout(_TIMEOUT_S), self._redis.pipeline(transaction=False) as pipe:
            for start in range(0, len(lines), LINES_PER_ENTRY):
                entry = b"\n".join(lines[start : start + LINES_PER_ENTRY])
                pipe.xadd(self._stream, {FIELD: entry}, maxlen=MAX_STREAM_LENGTH, approximate=True)
            if lines:
                await pipe.execute()
        if lines:
            log.info("retold", lines=len(lines), first_life=not self._life)
        self._life = life
        return len(lines)


def last_minute(tail: Sequence[bytes], *, now_ms: int) -> Sequence[bytes]:
    """Return the lines about what ended within `RETOLD_MS` before the last end; none if that was a day ago. Pure."""
    read: list[tuple[bytes, _Line]] = []
    for raw in tail:
        try:
            read.append((raw, _decoder.decode(raw)))
        except msgspec.DecodeError:  # torn by a power cut
            continue
    last_ms = max((line.ended_unix_ms for _, line in read), default=0)
    if last_ms < now_ms - OLDEST_MS:
        return ()
    recent = {line.rid for _, line in read if line.rid and line.ended_unix_ms >= last_ms - RETOLD_MS}
    return [raw for raw, line in read if (line.rid or line.delivered) in recent]
