"""Models beside the catalogue's file: the SQL on `tenancy.model`, and how every process comes to know them."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts import keys
from contracts.additions import AddedModel, LiveModels, encode_added
from contracts.errors import ServingError
from gateway.audit import record
from gateway.auth import DATABASE_ERRORS
from gateway.tables import model

log = structlog.get_logger()

RELOAD_S: Final = 5.0
_REDIS_S: Final = 2.0
_LOCK: Final = 0x70646761_74650005  # advisory lock of what is published


class NameTaken(ServingError):
    """There is a model of that name."""

    code, type, http_status = "name_taken", "invalid_request_error", 409

    def __init__(self, name: str) -> None:
        super().__init__(f"'{name}' names something already.", param="name")


class ModelBook:
    """Repository of added models. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def all(self) -> Sequence[AddedModel]:
        """Return every one, in the order in which they were added."""
        async with self._engine.begin() as db:
            return await _all(db)

    async def publish(self, redis: Redis) -> Sequence[AddedModel]:
        """Write every one to Redis and return them. One gateway at a time, so that the newest reading stays.

        Raises:
            RedisError, TimeoutError: Redis does not answer.
        """
        async with self._engine.begin() as db:
            await db.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            found = await _all(db)
            async with asyncio.timeout(_REDIS_S):
                await redis.set(keys.ADDED_MODELS, encode_added(found))
        return found

    async def add(self, wanted: AddedModel, *, actor: str) -> None:
        """Add a model. Raises NameTaken."""
        values = {"name": wanted.name, "definition": msgspec.to_builtins(wanted), "actor": actor}
        detail = {"pool": wanted.pool, "folder": wanted.folder, "profile": wanted.profile}
        try:
            async with self._engine.begin() as db:
                await db.execute(sa.insert(model).values(values))
                await record(
                    db, actor=actor, action="added", kind="model", subject=wanted.name, org=None, detail=detail
                )
        except IntegrityError:
            raise NameTaken(wanted.name) from None

    async def remove(self, name: str, *, actor: str) -> bool:
        """Take a model out; False when it was not there."""
        async with self._engine.begin() as db:
            gone = await db.execute(sa.delete(model).where(model.c.name == name))
            if gone.rowcount:
                await record(db, actor=actor, action="removed", kind="model", subject=name, org=None)
        return bool(gone.rowcount)


async def _all(db: AsyncConnection) -> Sequence[AddedModel]:
    query = sa.select(model.c.definition).order_by(model.c.added_at, model.c.name)
    return [msgspec.convert(row, AddedModel) for row in (await db.execute(query)).scalars()]


class Additions:
    """Keeps this gateway's catalogue, and the key that other processes read, as the table says. `run` it."""

    def __init__(self, book: ModelBook, redis: Redis, models: LiveModels) -> None:
        self.models = models
        self._book = book
        self._redis = redis
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        """Read the table soon: another gateway changed it."""
        self._changed.set()

    async def refresh(self) -> None:
        """Read the table, take what it says and tell the other processes. Raises one of DATABASE_ERRORS."""
        try:
            added = await self._book.publish(self._redis)
        except RedisError:
            added = await self._book.all()
            log.warning("models_not_published")
        self.models.take(added)

    async def run(self) -> None:
        """Refresh again and again, and when told."""
        while True:
            self._changed.clear()
            try:
                await self.refresh()
            except DATABASE_ERRORS as error:
                log.warning("models_not_reloaded", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELOAD_S):
                    await self._changed.wait()
