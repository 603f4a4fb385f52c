"""What became of the requests of one pool, told by the gateways that settled them: then they are forgotten here.

Nothing waits for it, so the stream is read in batches. A gateway may settle before the last words of the workers have
come here. Those tell the stages that a miss is blamed on, so such an outcome waits for them a little.
"""

import time
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat
from contracts.resp import RespConnection
from contracts.usage import Outcome
from contracts.wire import FIELD, RequestOutcome
from scheduler.book import Book
from scheduler.verdicts import Verdicts

log = structlog.get_logger()

_AT_ONCE = 1000
_LAST_WORD_S = 0.5
_FIELD = FIELD.encode()

_decode = msgspec.msgpack.Decoder(RequestOutcome).decode


class Outcomes:
    """One term's reading of one pool's outcomes: `begin`, then `run` until cancelled."""

    def __init__(
        self, connection: RespConnection, pool: str, *, book: Book, verdicts: Verdicts, period_s: float
    ) -> None:
        self._connection = connection
        self._pool = pool
        self._key = keys.outcomes(pool)
        self._book = book
        self._verdicts = verdicts
        self._period_s = period_s
        self._last_id: bytes = b"0-0"
        self._read: list[tuple[float, RequestOutcome]] = []  # and until when each may wait, monotonic s

    async def begin(self) -> None:
        """Skip what was written so far. Raises redis.exceptions.RedisError."""
        last: Any = await self._connection.call("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        self._last_id = last[0][0] if last else b"0-0"

    async def run(self) -> None:
        """Read again and again; while Redis is away, try."""
        while True:
            await beat(self._period_s)
            try:
                answer: Any = await self._connection.call(
                    "XREAD", "COUNT", _AT_ONCE, "STREAMS", self._key, self._last_id
                )
            except RedisError as error:
                log.warning("outcomes_failed", pool=self._pool, error=str(error))
                continue
            self._take(answer[0][1] if answer else (), time.monotonic())

    def _take(self, rows: Any, now_s: float) -> None:
        for entry_id, fields in rows:
            self._last_id = entry_id
            try:
                self._read.append((now_s + _LAST_WORD_S, _decode(fields[fields.index(_FIELD) + 1])))
            except (ValueError, msgspec.MsgspecError):
                log.warning("bad_outcome", pool=self._pool, entry_id=entry_id.decode())
        read, self._read = self._read, []
        for until_s, outcome in read:
            if now_s < until_s and self._is_early(outcome):
                self._read.append((until_s, outcome))
            else:
                self._verdicts.forget(outcome.rid, outcome)

    def _is_early(self, outcome: RequestOutcome) -> bool:
        """Whether the workers of a finished request have not all said so."""
        request = self._book.get(outcome.rid)
        return request is not None and not request.ended and outcome.outcome == Outcome.FINISHED
