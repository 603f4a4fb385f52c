"""Entries that billing could not write: listed, looked at, and delivered again once their cause is mended."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from billing.attempts import attempt_streams
from billing.consumer import usage_streams
from billing.moments import moment
from contracts.wire import FIELD

_PAGE: Final = 500

# Delivered again and taken off in one step, by whoever comes first.
_REDRIVE: Final = """
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if #found == 0 then return 0 end
local fields = found[1][2]
for i = 1, #fields, 2 do
  if fields[i] == 'd' then redis.call('XADD', KEYS[2], '*', 'd', fields[i + 1]) end
end
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
"""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One buried entry. `id` names it for the commands: STREAM/ENTRY."""

    id: str
    stream: str
    buried_at: datetime
    reason: str
    raw: bytes

    @property
    def content(self) -> Any:
        """Return what the entry says, as far as it can be read."""
        try:
            return msgspec.msgpack.decode(self.raw)
        except msgspec.DecodeError:
            return self.raw.hex()


class DeadLetters:
    """The dead-letter streams of usage and of the pools' attempts."""

    def __init__(self, redis: Redis, pools: Sequence[str]) -> None:
        self._redis = redis
        self._source: Mapping[str, str] = {
            dead: stream for stream, dead in {**usage_streams(), **attempt_streams(pools)}.items()
        }
        self._redrive = redis.register_script(_REDRIVE)

    async def list(self, *, reason: str | None = None, most: int = 1000) -> Sequence[DeadLetter]:
        """Return the oldest entries, at most `most`; `reason`: only those whose reason starts with it."""
        found: list[DeadLetter] = []
        for dead in self._source:
            start = "-"
            while len(found) < most:
                page: Any = await self._redis.xrange(dead, min=start, count=_PAGE)
                found += [one for one in (_letter(dead, *entry) for entry in page) if _has(one, reason)]
                if len(page) < _PAGE:
                    break
                start = f"({page[-1][0].decode()}"
        return sorted(found, key=lambda one: one.buried_at)[:most]

    async def find(self, letter_id: str) -> DeadLetter | None:
        """Return one entry by its id, None when it is not there."""
        dead, _, entry = letter_id.rpartition("/")
        if dead not in self._source:
            return None
        page: Any = await self._redis.xrange(dead, min=entry, max=entry)
        return _letter(dead, *page[0]) if page else None

    async def redrive(self, letters: Iterable[DeadLetter]) -> int:
        """Put entries back into the streams they came from; return how many were still there."""
        done = 0
        for one in letters:
            entry = one.id.rpartition("/")[2]
            answer: Any = await self._redrive(keys=[one.stream, self._source[one.stream]], args=[entry])
            done += int(answer)
        return done


def _letter(dead: str, entry: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        id=f"{dead}/{entry.decode()}",
        stream=dead,
        buried_at=moment(int(entry.partition(b"-")[0])),
        reason=fields.get(b"reason", b"").decode(errors="replace"),
        raw=fields.get(FIELD.encode(), b""),
    )


def _has(one: DeadLetter, reason: str | None) -> bool:
    return reason is None or one.reason.startswith(reason)
