"""What schedulers tell this gateway, read from its own stream."""

import asyncio
from typing import Any, Final

import msgspec
import structlog
from redis.exceptions import RedisError

from contracts import keys
from contracts.resp import RespConnection
from contracts.wire import FIELD, AttemptLost, Placed, Refused, decode_notice
from gateway.fleet import Fleet
from gateway.table import LiveTable

log = structlog.get_logger()

_COUNT: Final = 256
_BLOCK_MS: Final = 1000
_RETRY_S: Final = 0.2
_FIELD: Final = FIELD.encode()


class Notices:
    """Reads notices and hands them to their requests. `run` until cancelled."""

    def __init__(self, connection: RespConnection, table: LiveTable, fleet: Fleet, *, gateway_id: str) -> None:
        """`connection` is this reader's own, since the read blocks it."""
        self._connection = connection
        self._table = table
        self._fleet = fleet
        self._stream = keys.notices(gateway_id)
        self._last_id: bytes | str = "0"

    async def run(self) -> None:
        """Read again and again, however long Redis is away."""
        while True:
            try:
                answer: Any = await self._connection.call(
                    "XREAD", "COUNT", _COUNT, "BLOCK", _BLOCK_MS, "STREAMS", self._stream, self._last_id
                )
            except (RedisError, OSError):
                await asyncio.sleep(_RETRY_S)
                continue
            for entry_id, raw in _entries(answer):
                self._last_id = entry_id
                self._take(raw)

    def _take(self, raw: bytes) -> None:
        try:
            notice = decode_notice(raw)
            generation = self._table.find(notice.rid)
        except (msgspec.DecodeError, ValueError) as error:
            log.error("bad_notice", error=str(error))  # noqa: TRY400 - the entry's fault, not ours
            return
        match notice:
            case Placed():
                self._fleet.know(notice.decode)
                if notice.prefill is not None:
                    self._fleet.know(notice.prefill)
                if generation is not None:
                    generation.notice_placed(notice)
            case Refused():
                if generation is not None:
                    generation.notice_refused(notice)
            case AttemptLost():
                if generation is not None:
                    generation.notice_lost(notice)


def _entries(answer: Any) -> list[tuple[bytes, bytes]]:
    """Return (id, payload) of the entries in an XREAD answer: [[stream, [[id, [field, value, ...]], ...]]]."""
    if not answer:
        return []
    ((_, rows),) = answer
    return [(entry_id, fields[fields.index(_FIELD) + 1]) for entry_id, fields in rows if _FIELD in fields]
