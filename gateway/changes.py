"""Changes that every gateway must know within the second: revoked keys, suspended tenants and models.

1. Who changes something writes it and a row of `tenancy.change` in one transaction: the audit log.
2. `Announcer.publish_pending` brings rows that are not published to Redis: a key's state into its organisation's
   shard, where the reserve script compares it, and every change into the stream `keys.CHANGES`. Then the call
   answers. If it died before that, the gateways' own loop publishes the row.
3. `Watcher` reads the stream in every gateway. The read blocks half a second, so it is poll and subscription in one,
   and what comes during an outage of Redis is read after it. It changes the memory of keys and holds, and ends
   running streams unless they may drain.
4. Every gateway also reads all holds and names of models from Postgres, at start and every `RELOAD_S`; names also
   as soon as one is changed.
"""

import asyncio
import contextlib
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts import keys
from contracts.beat import beat, until_beat_s
from contracts.errors import InvalidApiKey, ServingError
from contracts.resp import RespConnection
from contracts.wire import FIELD, Change, decode_change, encode
from gateway.audit import record
from gateway.auth import DATABASE_ERRORS, Authenticator
from gateway.holds import Hold, Holds, Suspended
from gateway.model_book import Additions
from gateway.names import NameBook, Names
from gateway.table import LiveTable
from gateway.tables import change, hold
from gateway.tenants import CHANGES_KEPT, Tenants, publish_key_state
from gateway.texts import Texts

log = structlog.get_logger()

RELOAD_S: Final = 5.0
_BLOCK_MS: Final = 500
_COUNT: Final = 256
_RETRY_S: Final = 0.2
_REDIS_TIMEOUT_S: Final = 2.0
_BATCH: Final = 200


class HoldBook:
    """Repository of holds. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def put(self, wanted: Hold, *, org: str | None) -> None:
        """Hold something, or change how it is held."""
        values = {name: getattr(wanted, name) for name in ("kind", "id", "mode", "drain", "reason", "actor")}
        async with self._engine.begin() as db:
            await db.execute(sa.delete(hold).where(hold.c.kind == wanted.kind, hold.c.id == wanted.id))
            await db.execute(sa.insert(hold).values(values))
            detail = {"mode": wanted.mode, "drain": wanted.drain, "reason": wanted.reason}
            await record(
                db, actor=wanted.actor, action=wanted.mode, kind=wanted.kind, subject=wanted.id, org=org, detail=detail
            )

    async def lift(self, kind: str, name: str, *, org: str | None, actor: str) -> bool:
        """Hold something no more; False when it was not held."""
        async with self._engine.begin() as db:
            gone = await db.execute(sa.delete(hold).where(hold.c.kind == kind, hold.c.id == name))
            if not gone.rowcount:
                return False
            await record(db, actor=actor, action="resumed", kind=kind, subject=name, org=org)
        return True

    async def all(self) -> Sequence[Hold]:
        """Return everything that is held."""
        async with self._engine.begin() as db:
            rows = (await db.execute(sa.select(hold).order_by(hold.c.kind, hold.c.id))).mappings().all()
        return [Hold(**{name: row[name] for name in Hold.__struct_fields__}) for row in rows]


class Announcer:
    """Publishes changes that are recorded and not yet in Redis."""

    def __init__(self, engine: AsyncEngine, redis: Redis) -> None:
        self._engine = engine
        self._redis = redis
        self._tenants = Tenants(engine)

    async def publish_pending(self) -> int:
        """Publish them, oldest first; return how many. Raises RedisError or one of DATABASE_ERRORS."""
        pending = sa.select(change).where(change.c.published_at.is_(None)).order_by(change.c.id).limit(_BATCH)
        async with self._engine.begin() as db:
            rows = (await db.execute(pending.with_for_update(skip_locked=True))).mappings().all()
            for row in rows:
                await self._publish(row)
            if rows:
                published = sa.update(change).where(change.c.id.in_([row["id"] for row in rows]))
                await db.execute(published.values(published_at=dt.datetime.now(dt.UTC)))
        return len(rows)

    async def _publish(self, row: sa.RowMapping) -> None:
        async with asyncio.timeout(_REDIS_TIMEOUT_S):
            if row["kind"] == "key":
                key = await self._tenants.find_key(row["organisation_id"], row["subject"])
                if key is not None:
                    await publish_key_state(self._redis, key)
                return
            state, drain = row["detail"].get("mode", ""), bool(row["detail"].get("drain"))
            await announce(self._redis, Change(kind=row["kind"], id=row["subject"], state=state, drain=drain))


async def announce(redis: Redis, what: Change) -> None:
    """Tell every gateway. Raises RedisError."""
    await redis.xadd(keys.CHANGES, {FIELD: encode(what)}, maxlen=CHANGES_KEPT, approximate=True)


class Watcher:
    """Makes a gateway know changes. `run` and `reload` until cancelled."""

    def __init__(
        self,
        connection: RespConnection,
        book: HoldBook,
        announcer: Announcer,
        *,
        auth: Authenticator,
        holds: Holds,
        table: LiveTable,
        names: Names,
        name_book: NameBook,
        additions: Additions,
        texts: Texts,
    ) -> None:
        """`connection` is this reader's own, since the read blocks it."""
        self._additions = additions
        self._texts = texts
        self._names = names
        self._name_book = name_book
        self._renamed = asyncio.Event()
        self._connection = connection
        self._book = book
        self._announcer = announcer
        self._auth = auth
        self._holds = holds
        self._table = table
        self._last_id: bytes | str = ""

    async def run(self) -> None:
        """Read the stream again and again, however long Redis is away."""
        while True:
            try:
                if not self._last_id:
                    self._last_id = await self._newest()
                answer: Any = await self._connection.call(
                    "XREAD", "COUNT", _COUNT, "BLOCK", _BLOCK_MS, "STREAMS", keys.CHANGES, self._last_id
                )
            except (RedisError, OSError):
                await asyncio.sleep(_RETRY_S)
                continue
            for _, rows in answer or ():
                for entry_id, fields in rows:
                    self._last_id = entry_id
                    self._take(fields[1])

    async def reload(self) -> None:
        """Read all holds and publish what nobody published, again and again."""
        while True:
            try:
                for new in self._holds.replace(await self._book.all()):
                    self._end_held(new)
                await self._announcer.publish_pending()
            except (*DATABASE_ERRORS, RedisError) as error:
                log.warning("changes_not_reloaded", error=str(error))
            await beat(RELOAD_S)

    async def reload_names(self) -> None:
        """Read all names of models, again and again, and when one was changed."""
        while True:
            self._renamed.clear()
            try:
                self._names.replace(await self._name_book.all())
            except DATABASE_ERRORS as error:
                log.warning("names_not_reloaded", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat_s(RELOAD_S)):
                    await self._renamed.wait()

    async def _newest(self) -> bytes | str:
        answer: Any = await self._connection.call("XREVRANGE", keys.CHANGES, "+", "-", "COUNT", 1)
        return answer[0][0] if answer else "0"

    def _take(self, raw: bytes) -> None:
        try:
            what = decode_change(raw)
        except msgspec.DecodeError as error:
            log.error("bad_change", error=str(error))  # noqa: TRY400 - the entry's fault, not ours
            return
        log.info("change_seen", kind=what.kind, subject=what.id, state=what.state)
        if what.kind == "key":
            if what.state.startswith("active:"):
                self._auth.forget(what.id)
            else:
                self._auth.revoked(what.id)
                self._end({"key": what.id}, InvalidApiKey("This API key was revoked."), "key_revoked")
        elif what.kind == "name":
            self._renamed.set()
        elif what.kind == "catalogue":
            self._additions.look_again()
        elif what.kind == "budget":
            self._auth.forget_organisation(what.id)
        elif what.kind == "texts":
            self._auth.forget_organisation(what.id)
            self._texts.look_again()
        elif what.state:
            new = Hold(kind=what.kind, id=what.id, mode=what.state, drain=what.drain)
            self._holds.set(new)
            self._end_held(new)
        else:
            self._holds.lift(what.kind, what.id)

    def _end_held(self, new: Hold) -> None:
        if not new.drain:
            self._end({new.kind: new.id}, Suspended(f"This {new.kind} was suspended."), "suspended")

    def _end(self, whose: Mapping[str, str], error: ServingError, cause: str) -> None:
        for generation in self._table:
            owner = generation.terms.owner
            names = {"key": owner.key_id, "org": owner.org, "project": owner.project, "model": owner.model}
            if all(names[kind] == name for kind, name in whose.items()):
                generation.withdrawn(error, cause=cause)
