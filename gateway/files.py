"""Files of organisations: the only file with SQL on `tenancy.file` and its parts."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts.errors import BadRequest, BodyTooLarge, NotFound
from gateway.auth import DATABASE_ERRORS
from gateway.batch_tables import batch, file, file_part
from gateway.ids import new_id
from gateway.tenant_read import tenant_read

log = structlog.get_logger()

PART_BYTES: Final = 1024 * 1024
PURPOSES: Final = ("batch", "batch_output")
KEPT: Final = dt.timedelta(days=30)  # files of batches, unless the upload says otherwise, as at OpenAI
SWEEP_S: Final = 60.0
SWEEP_FILES: Final = 50


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file without its bytes."""

    id: str
    organisation_id: str
    project_id: str
    purpose: str
    filename: str
    bytes: int
    created_at: dt.datetime
    expires_at: dt.datetime | None


class Files:
    """Repository of files. Each call is one transaction; those that take a connection are part of the caller's."""

    def __init__(self, engine: AsyncEngine, *, max_organisation_bytes: int) -> None:
        self._engine = engine
        self._max_organisation_bytes = max_organisation_bytes

    async def create(
        self,
        tenant: str,
        project_id: str,
        pieces: AsyncIterator[bytes],
        *,
        purpose: str,
        filename: str,
        kept: dt.timedelta = KEPT,
    ) -> StoredFile:
        """Store a file for the time `kept`.

        Raises:
            BodyTooLarge: the organisation's files would take more than they may.
        """
        async with self._engine.begin() as db:
            taken = sa.select(sa.func.coalesce(sa.func.sum(file.c.bytes), 0)).where(_of(tenant))
            room = self._max_organisation_bytes - int((await db.execute(taken)).scalar_one())
            return await self.write(
                db, tenant, project_id, pieces, purpose=purpose, filename=filename, room=room, kept=kept
            )

    async def write(
        self,
        db: AsyncConnection,
        tenant: str,
        project_id: str,
        pieces: AsyncIterator[bytes],
        *,
        purpose: str,
        filename: str,
        room: int | None = None,
        kept: dt.timedelta = KEPT,
    ) -> StoredFile:
        """Store a file in the caller's transaction. Raises BodyTooLarge when it has more than `room` bytes."""
        file_id = new_id("file").replace("_", "-", 1)
        values = {
            "id": file_id,
            "organisation_id": tenant,
            "project_id": project_id,
            "purpose": purpose,
            "filename": filename,
            "bytes": 0,
            "expires_at": sa.func.now() + kept,
        }
        await db.execute(sa.insert(file).values(values))
        size = part = 0
        waiting = bytearray()
        async for piece in pieces:
            waiting += piece
            size += len(piece)
            if room is not None and size > room:
                raise BodyTooLarge(
                    f"The files of this organisation may take {self._max_organisation_bytes // 2**20} MB; delete some."
                )
            while len(waiting) >= PART_BYTES:
                await self._write_part(db, file_id, part, bytes(waiting[:PART_BYTES]))
                del waiting[:PART_BYTES]
                part += 1
        if waiting:
            await self._write_part(db, file_id, part, bytes(waiting))
        update = sa.update(file).where(file.c.id == file_id).values(bytes=size).returning(*file.c)
        return _file((await db.execute(update)).mappings().one())

    async def find(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file. Raises NotFound."""
        query = sa.select(file).where(_of(tenant), file.c.id == clean(file_id))
        async with tenant_read(self._engine, tenant) as db:
            row = (await db.execute(query)).mappings().one_or_none()
        if row is None:
            raise NotFound(f"No such File object: {file_id}", param="id")
        return _file(row)

    async def list(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool = True
    ) -> Sequence[StoredFile]:
        """Return up to `limit` files, beginning behind the file `after`. Raises NotFound when there is none such."""
        query = sa.select(file).where(_of(tenant))
        if purpose is not None:
            query = query.where(file.c.purpose == purpose)
        at = sa.tuple_(file.c.created_at, file.c.id)
        if after is not None:
            last = await self.find(tenant, after)
            before = sa.tuple_(sa.literal(last.created_at), sa.literal(last.id))
            query = query.where(at < before if newest_first else at > before)
        order = (file.c.created_at.desc(), file.c.id.desc()) if newest_first else (file.c.created_at, file.c.id)
        async with tenant_read(self._engine, tenant) as db:
            rows = (await db.execute(query.order_by(*order).limit(limit))).mappings().all()
        return [_file(row) for row in rows]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFound."""
        async with self._engine.begin() as db:
            mine = _of(tenant) & (file.c.id == clean(file_id))
            gone = await db.execute(sa.delete(file).where(mine).returning(file.c.id))
            if gone.one_or_none() is None:
                raise NotFound(f"No such File object: {file_id}", param="id")

    async def run(self) -> None:
        """Delete files whose time is over, in whichever gateway comes first, until cancelled."""
        while True:
            try:
                while await self.delete_expired_across_tenants() == SWEEP_FILES:
                    pass
            except DATABASE_ERRORS as error:
                log.warning("files_not_swept", error=str(error))
            await asyncio.sleep(SWEEP_S)

    async def delete_expired_across_tenants(self) -> int:
        """Delete some of the files whose time is over and return how many. A batch that waits for one keeps it."""
        waiting = sa.select(batch.c.input_file_id).where(batch.c.status == "validating")
        over = (
            sa.select(file.c.id)
            .where(file.c.expires_at <= sa.func.now(), file.c.id.not_in(waiting))
            .limit(SWEEP_FILES)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        async with self._engine.begin() as db:
            gone = await db.execute(sa.delete(file).where(file.c.id.in_(over)).returning(file.c.id))
            return len(gone.all())

    async def read(self, tenant: str, file_id: str) -> AsyncIterator[bytes]:
        """Yield the bytes of a file, piece by piece. A file that is deleted meanwhile ends early. Raises NotFound."""
        await self.find(tenant, file_id)
        part = 0
        while True:
            query = sa.select(file_part.c.data).where(file_part.c.file_id == file_id, file_part.c.part == part)
            async with tenant_read(self._engine, tenant) as db:
                data = (await db.execute(query)).scalar_one_or_none()
            if data is None:
                return
            yield bytes(data)
            part += 1

    async def _write_part(self, db: AsyncConnection, file_id: str, part: int, data: bytes) -> None:
        await db.execute(sa.insert(file_part).values(file_id=file_id, part=part, data=data))


def _of(tenant: str) -> sa.ColumnElement[bool]:
    """The tenant's files whose time is not over."""
    return (file.c.organisation_id == tenant) & (file.c.expires_at.is_(None) | (file.c.expires_at > sa.func.now()))


def check_purpose(purpose: str) -> str:
    """Return the purpose of an upload. Raises BadRequest."""
    if purpose != "batch":
        raise BadRequest(f"Files of purpose '{purpose}' are not supported; 'batch' is.", param="purpose")
    return purpose


def clean(name: str) -> str:
    """Return an id without what PostgreSQL takes in no text; no id of ours has any."""
    return name.replace("\0", "")


def _file(row: sa.RowMapping) -> StoredFile:
    return StoredFile(**{name: row[name] for name in StoredFile.__struct_fields__})
