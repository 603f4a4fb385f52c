"""The pool's inbox: a Redis stream read through a consumer group by whoever leads.

A submit stays pending until it is settled, so a new leader finds it. Entries are claimed from other
consumers only at take-over, and from those who read on after they had lost the lease: never by age.
"""

from collections.abc import Sequence
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from contracts import keys
from contracts.resp import RespConnection
from contracts.wire import FIELD

log = structlog.get_logger()

_CLAIM_BATCH = 200
_READ_BATCH = 64
_FIELD = FIELD.encode()
_OLD_CONSUMER_MS = 3_600_000

Entry = tuple[bytes, bytes]
"""Entry id and the bytes of its field `d` (empty when there is none)."""


class Inbox:
    """One scheduler's reading of one pool's inbox."""

    def __init__(self, redis: Redis, reader: RespConnection, pool: str, scheduler_id: str) -> None:
        self._redis = redis
        self._reader = reader  # used by the blocking read alone
        self._key = keys.inbox(pool)
        self._group = keys.CONSUMER_GROUP_SCHEDULER
        self._consumer = scheduler_id
        self._pool = pool

    async def ensure_group(self) -> None:
        """Create stream and group if they are missing; the group starts with the oldest entry."""
        try:
            await self._redis.xgroup_create(self._key, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def began_again_s(self) -> float | None:
        """Return how long ago Redis was first seen in another life than before, seconds; None = never, or unknown.

        It may have lost what it held at its end. That is kept in Redis, so that the next leader knows it, too.
        """
        try:
            life = str((await self._redis.info("server"))["run_id"])
        except ResponseError:  # it does not say who it is
            return None
        key = keys.redis_life(self._pool)
        now_s, _ = await self._redis.time()
        raw: Any = await self._redis.get(key)
        before, _, since = raw.decode().partition(" ") if raw else ("", "", "")
        if before == life:
            return max(0.0, now_s - int(since)) if since else None
        await self._redis.set(key, f"{life} {now_s}" if before else life)
        return 0.0 if before else None

    async def claim_all(self) -> list[Entry]:
        """Take over every pending entry, one's own included, oldest first."""
        start: bytes = b"0-0"
        entries: list[Entry] = []
        while True:
            answer: Any = await self._redis.xautoclaim(
                self._key, self._group, self._consumer, min_idle_time=0, start_id=start, count=_CLAIM_BATCH
            )
            start = answer[0]
            entries += _entries(answer[1])
            if start == b"0-0":
                return entries

    async def claim_strays(self) -> list[Entry]:
        """Take over what a former leader read after the take-over, and drop consumers long gone."""
        entries: list[Entry] = []
        for consumer in await self._redis.xinfo_consumers(self._key, self._group):
            name: bytes = consumer["name"]
            if name == self._consumer.encode():
                continue
            if consumer["pending"]:
                rows = await self._redis.xpending_range(
                    self._key, self._group, min="-", max="+", count=_CLAIM_BATCH, consumername=name
                )
                ids: Any = [row["message_id"] for row in rows]
                claimed: Any = await self._redis.xclaim(self._key, self._group, self._consumer, 0, ids)
                entries += _entries(claimed)
            elif consumer["idle"] > _OLD_CONSUMER_MS:
                await self._redis.xgroup_delconsumer(self._key, self._group, name)
        return entries

    async def read(self, block_s: float) -> list[Entry]:
        """Return new entries, waiting up to `block_s` for the first."""
        try:
            answer: Any = await self._reader.call(
                "XREADGROUP",
                "GROUP",
                self._group,
                self._consumer,
                "COUNT",
                _READ_BATCH,
                "BLOCK",
                int(block_s * 1000),
                "STREAMS",
                self._key,
                ">",
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            log.warning("inbox_group_missing", pool=self._pool)
            await self.ensure_group()
            return []
        rows = answer[0][1] if answer else ()
        return [(entry_id, _field_of(fields)) for entry_id, fields in rows]

    async def read_again(self) -> list[Entry]:
        """Return everything that Redis gave to this scheduler and that is pending, known here or not.

        A read that broke off may have been carried out: its entries are ours, and no later read brings them.
        """
        entries: list[Entry] = []
        start: bytes | str = "0"
        while True:
            answer: Any = await self._reader.call(
                "XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", _CLAIM_BATCH, "STREAMS", self._key, start
            )
            rows = answer[0][1] if answer else ()
            if not rows:
                return entries
            start = rows[-1][0]
            entries += [(entry_id, _field_of(fields)) for entry_id, fields in rows if fields is not None]

    async def missing(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        """Return those of the entries that are not pending any more: somebody settled them."""
        pipeline = self._redis.pipeline(transaction=False)
        for entry_id in entry_ids:
            pipeline.xpending_range(self._key, self._group, min=entry_id, max=entry_id, count=1)
        answers = await pipeline.execute()
        return {entry_id for entry_id, rows in zip(entry_ids, answers, strict=True) if not rows}

    async def num_pending(self) -> int:
        """Return how many entries are unsettled."""
        return int((await self._redis.xpending(self._key, self._group))["pending"])


def _field_of(flat: list[bytes] | None) -> bytes:
    """Return the value of the field `d` in a flat list of names and values."""
    names = flat or []
    return next((names[i + 1] for i in range(0, len(names), 2) if names[i] == _FIELD), b"")


def _entries(rows: Sequence[tuple[bytes, dict[bytes, bytes] | None]]) -> list[Entry]:
    return [(entry_id, (fields or {}).get(_FIELD, b"")) for entry_id, fields in rows if entry_id is not None]
