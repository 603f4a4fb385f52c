"""Redis streams read by a consumer group: the mechanics that usage and attempts share.

1. `read` takes new entries of all streams in one call; they stay pending until they are acknowledged. A cluster refuses
   one call for streams of several tags: there every stream is asked by itself, without blocking.
2. `claim` takes over what another consumer read and never acknowledged.
3. `acknowledge` after the database committed. A crash between the two delivers the entry again.
4. `bury` moves an entry that can never be processed to a dead-letter stream, once, with the reason.

Any number of consumers may do this at once: one entry may reach two of them, but never none.
"""

from asyncio import get_running_loop, sleep, timeout
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisClusterException, ResponseError

from contracts.wire import FIELD

_FIELD: Final = FIELD.encode()
_GONE_AFTER_MS: Final = 3_600_000
_ANSWER_S: Final = 10.0  # for any command, beyond the time it may block
_ASK_AGAIN_S: Final = 0.1  # streams of a cluster, when none had anything

# Only the consumer whose XACK counted buries, so that two holders of one entry bury it once.
_BURY: Final = """
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', 'd', ARGV[3], 'reason', ARGV[4], 'entry', ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
"""


class Entry(msgspec.Struct, frozen=True):
    """One stream entry. `raw` is its field `d`, empty when it has none."""

    stream: str
    entry_id: bytes
    raw: bytes


class GroupReader:
    """One consumer of a group over several streams, each with its dead-letter stream."""

    def __init__(self, redis: Redis, *, group: str, consumer: str, streams: Mapping[str, str]) -> None:
        """`streams`: stream -> its dead-letter stream (same cluster tag)."""
        self._redis = redis
        self._group = group
        self._consumer = consumer
        self._dead = dict(streams)
        self._bury = redis.register_script(_BURY)
        self._next: dict[Any, Any] = dict.fromkeys(streams, ">")
        self._apart = False

    async def follow(self, streams: Mapping[str, str]) -> None:
        """Read these too from now on. Raises redis.exceptions.RedisError."""
        if streams.keys() <= self._dead.keys():
            return
        self._dead = {**self._dead, **streams}  # another one: a read that is under way goes on with the old
        await self.create_groups()
        self._next = dict.fromkeys(self._dead, ">")

    async def create_groups(self) -> None:
        """Make the group on every stream, from its first entry on; harmless when it is there."""
        pipe = self._redis.pipeline(transaction=False)
        for stream in self._dead:
            pipe.xgroup_create(stream, self._group, id="0", mkstream=True)
        for answer in await self._answers(pipe):
            if isinstance(answer, Exception) and "BUSYGROUP" not in str(answer):
                raise answer

    async def read(self, *, count: int, block_ms: int) -> list[Entry]:
        """Return new entries, at most `count` per stream; none after `block_ms` without any.

        A stream that lost its group (with all its data) gets it back. Raises redis.exceptions.RedisError.
        """
        try:
            async with timeout(block_ms / 1000 + _ANSWER_S):
                answer: Any = (
                    await self._read_apart(count=count, block_ms=block_ms)
                    if self._apart
                    else await self._redis.xreadgroup(
                        self._group, self._consumer, self._next, count=count, block=block_ms
                    )
                )
        except RedisClusterException as error:  # the client's own; the server's answer is the next one
            if "slot" not in str(error):
                raise
            self._apart = True
            return []
        except ResponseError as error:
            if "CROSSSLOT" in str(error):
                self._apart = True
            elif "NOGROUP" in str(error):
                await self.create_groups()
            else:
                raise
            return []
        pairs = answer.items() if isinstance(answer, dict) else answer
        return [_entry(_text(name), entry_id, fields) for name, entries in pairs for entry_id, fields in _flat(entries)]

    async def _read_apart(self, *, count: int, block_ms: int) -> list[Any]:
        """Return what every stream has, asked one by one, as soon as one has something or `block_ms` are over."""
        now_s = get_running_loop().time
        until_s = now_s() + block_ms / 1000
        while True:
            pipe = self._redis.pipeline(transaction=False)
            for stream in self._dead:
                pipe.xreadgroup(self._group, self._consumer, {stream: ">"}, count=count)
            found: list[Any] = []
            for answer in await self._answers(pipe):
                if isinstance(answer, Exception):
                    raise answer
                found += answer.items() if isinstance(answer, dict) else answer
            if found or now_s() >= until_s:
                return found
            await sleep(_ASK_AGAIN_S)

    async def claim(self, *, idle_ms: int, count: int) -> list[Entry]:
        """Return entries that some consumer has held for `idle_ms`, at most `count` per stream; they are ours then."""
        pipe = self._redis.pipeline(transaction=False)
        for stream in self._dead:
            pipe.xautoclaim(stream, self._group, self._consumer, min_idle_time=idle_ms, count=count)
        found: list[Entry] = []
        for stream, answer in zip(self._dead, await self._answers(pipe), strict=True):
            if isinstance(answer, Exception):
                if "NOGROUP" not in str(answer):
                    raise answer
                continue
            found += [_entry(stream, entry_id, fields) for entry_id, fields in answer[1] if fields is not None]
        return found

    async def acknowledge(self, entries: Sequence[Entry]) -> None:
        """Acknowledge and delete entries whose effect is committed."""
        by_stream: dict[str, list[bytes]] = {}
        for entry in entries:
            by_stream.setdefault(entry.stream, []).append(entry.entry_id)
        pipe = self._redis.pipeline(transaction=False)
        for stream, ids in by_stream.items():
            pipe.xack(stream, self._group, *ids)
            pipe.xdel(stream, *ids)
        async with timeout(_ANSWER_S):
            await pipe.execute()

    async def bury(self, entry: Entry, reason: str) -> bool:
        """Move an entry to its dead-letter stream; return False when somebody else dealt with it."""
        async with timeout(_ANSWER_S):
            answer: Any = await self._bury(
                keys=[entry.stream, self._dead[entry.stream]], args=[self._group, entry.entry_id, entry.raw, reason]
            )
        return bool(answer == 1)

    async def backlog(self) -> tuple[int, int]:
        """Return how many entries wait or are being processed, and how many are buried."""
        pipe = self._redis.pipeline(transaction=False)
        for stream in (*self._dead, *self._dead.values()):
            pipe.xlen(stream)
        async with timeout(_ANSWER_S):
            lengths: list[int] = await pipe.execute()
        return sum(lengths[: len(self._dead)]), sum(lengths[len(self._dead) :])

    async def forget_gone_consumers(self) -> None:
        """Remove the names of consumers that hold nothing and have not been seen for an hour."""
        await self.create_groups()  # asking about a stream that is not there is an error
        async with timeout(_ANSWER_S):
            for stream in self._dead:
                for consumer in await self._redis.xinfo_consumers(stream, self._group):
                    if consumer["pending"] == 0 and consumer["idle"] > _GONE_AFTER_MS:
                        await self._redis.xgroup_delconsumer(stream, self._group, consumer["name"])

    async def _answers(self, pipe: Pipeline) -> list[Any]:
        async with timeout(_ANSWER_S):
            return list(await pipe.execute(raise_on_error=False))


def _flat(entries: Any) -> Any:
    """Return (id, fields) pairs; with RESP3 the client nests them once more."""
    return entries[0] if entries and isinstance(entries[0], list) else entries


def _entry(stream: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    return Entry(stream, entry_id, fields.get(_FIELD, b""))


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
