"""Writes to Redis that nobody waits for: notices, acks, deletions. Sent in order, whatever queued up at once."""

import asyncio
from collections import deque

import msgspec
import structlog
from redis.exceptions import RedisError, ResponseError

from contracts import keys
from contracts.resp import Argument, RespConnection
from contracts.wire import FIELD, Notice, encode

log = structlog.get_logger()

_MAX_QUEUED = 100_000
_BATCH = 256
_RETRY_S = 0.2
_NOTICES_KEPT = 20_000
_DEAD_LETTERS_KEPT = 1_000
_OUTCOMES_KEPT = 100_000

_Command = tuple[Argument, ...]


class Outbox:
    """The queue of one pool's writes. What does not fit is dropped and counted: all of it is repeatable."""

    def __init__(self, connection: RespConnection, pool: str) -> None:
        self._connection = connection
        self._pool = pool
        self._queue: deque[_Command] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # for what may wait a little; always of the same length
        self._inbox = keys.inbox(pool)
        self._outcomes = keys.outcomes(pool)
        self.num_dropped = 0

    def notify(self, gateway_id: str, notice: Notice, *, within_s: float = 0.0) -> None:
        """Tell a gateway, in order, within `within_s`: with whatever else is written then."""
        self._add(
            ("XADD", keys.notices(gateway_id), "MAXLEN", "~", _NOTICES_KEPT, "*", FIELD, encode(notice)),
            within_s=within_s,
        )

    def write(self, command: _Command) -> None:
        """Send any other command whose answer nobody needs."""
        self._add(command)

    def acknowledge(self, entry_id: bytes) -> None:
        """Drop an inbox entry."""
        self._add(("XACK", self._inbox, keys.CONSUMER_GROUP_SCHEDULER, entry_id))
        self._add(("XDEL", self._inbox, entry_id))

    def delete_record(self, rid: str) -> None:
        """Drop an in-flight record."""
        self._add(("DEL", keys.inflight(self._pool, rid)))

    def dead_letter(self, entry_id: bytes, raw: bytes) -> None:
        """Keep an unreadable inbox entry for an operator and drop it from the inbox."""
        self._add(
            (
                "XADD",
                keys.inbox_dead_letters(self._pool),
                "MAXLEN",
                "~",
                _DEAD_LETTERS_KEPT,
                "*",
                FIELD,
                raw,
                "entry",
                entry_id,
            )
        )
        self.acknowledge(entry_id)

    def report_outcome(self, outcome: msgspec.Struct) -> None:
        """Add a wire.RequestOutcome."""
        self._add(("XADD", self._outcomes, "MAXLEN", "~", _OUTCOMES_KEPT, "*", FIELD, encode(outcome)))

    async def run(self) -> None:
        """Write until cancelled; while Redis is away, wait."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
                try:
                    replies = await self._connection.call_all(batch)
                except RedisError as error:
                    log.warning("outbox_waits", pool=self._pool, queued=len(self._queue), error=str(error))
                    self._queue.extendleft(reversed(batch))
                    await asyncio.sleep(_RETRY_S)
                    continue
                for command, reply in zip(batch, replies, strict=True):
                    if isinstance(reply, ResponseError):
                        log.warning("outbox_refused", pool=self._pool, command=command[0], error=str(reply))

    def _add(self, command: _Command, *, within_s: float = 0.0) -> None:
        if len(self._queue) >= _MAX_QUEUED:
            self.num_dropped += 1
            return
        self._queue.append(command)
        if not within_s:
            self._wake.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(within_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._wake.set()
