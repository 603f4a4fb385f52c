"""Batches and their lines: the only file with SQL on `tenancy.batch` and `tenancy.batch_line`.

A gateway that runs a batch holds it until `runner_until` and extends that; when it dies, another one takes over.
Every change of a run names its runner, so one that was replaced changes nothing.
"""

import datetime as dt
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts.errors import NotFound
from gateway.batch_lines import Line, LineError
from gateway.batch_tables import batch, batch_line
from gateway.files import clean
from gateway.ids import new_id
from gateway.tenant_read import tenant_read

WINDOW: Final = dt.timedelta(hours=24)
OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")
INSERT_ROWS: Final = 500
_NOW: Final = sa.func.now()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it stands."""

    id: str
    organisation_id: str
    project_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    status: str
    errors: Sequence[LineError]
    metadata: Mapping[str, str]
    total: int
    completed: int
    failed: int
    created_at: dt.datetime
    expires_at: dt.datetime
    in_progress_at: dt.datetime | None
    finalizing_at: dt.datetime | None
    cancelling_at: dt.datetime | None
    ended_at: dt.datetime | None


class LineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line with how it went."""

    line: int
    custom_id: str
    body: bytes
    state: str
    rid: str
    http_status: int
    answer: bytes | None


class RunnerReplaced(Exception):
    """Another gateway runs the batch now."""


class Batches:
    """Repository of batches. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine, *, runner: str) -> None:
        """`runner` is this gateway's name in claims."""
        self._engine = engine
        self._runner = runner

    # -- for tenants -----------------------------------------------------------------------------------------

    async def create(
        self,
        tenant: str,
        *,
        project_id: str,
        key_id: str,
        endpoint: str,
        input_file_id: str,
        metadata: Mapping[str, str],
    ) -> Batch:
        """Create a batch, to be validated by whoever claims it."""
        values = {
            "id": new_id("batch"),
            "organisation_id": tenant,
            "project_id": project_id,
            "key_id": key_id,
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "metadata": dict(metadata),
            "expires_at": _NOW + WINDOW,
        }
        async with self._engine.begin() as db:
            row = (await db.execute(sa.insert(batch).values(values).returning(*batch.c))).mappings().one()
        return _batch(row)

    async def find(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch. Raises NotFound."""
        query = sa.select(batch).where(batch.c.organisation_id == tenant, batch.c.id == clean(batch_id))
        async with tenant_read(self._engine, tenant) as db:
            row = (await db.execute(query)).mappings().one_or_none()
        if row is None:
            raise NotFound(f"No batch found with id '{batch_id}'.", param="batch_id")
        return _batch(row)

    async def list(self, tenant: str, *, after: str | None, limit: int) -> Sequence[Batch]:
        """Return up to `limit` batches, newest first, behind the batch `after`. Raises NotFound."""
        query = sa.select(batch).where(batch.c.organisation_id == tenant)
        if after is not None:
            last = await self.find(tenant, after)
            at = sa.tuple_(batch.c.created_at, batch.c.id)
            query = query.where(at < sa.tuple_(sa.literal(last.created_at), sa.literal(last.id)))
        query = query.order_by(batch.c.created_at.desc(), batch.c.id.desc()).limit(limit)
        async with tenant_read(self._engine, tenant) as db:
            rows = (await db.execute(query)).mappings().all()
        return [_batch(row) for row in rows]

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Ask for the end of a batch and return it; one that ends already is returned as it is. Raises NotFound."""
        change = (
            sa.update(batch)
            .where(
                batch.c.organisation_id == tenant,
                batch.c.id == clean(batch_id),
                batch.c.status.in_(("validating", "in_progress")),
            )
            .values(status="cancelling", cancelling_at=_NOW)
        )
        async with self._engine.begin() as db:
            await db.execute(change)
        return await self.find(tenant, batch_id)

    async def num_open(self, tenant: str) -> int:
        """Return how many batches of the tenant have not ended."""
        query = sa.select(sa.func.count()).where(batch.c.organisation_id == tenant, batch.c.status.in_(OPEN))
        async with self._engine.connect() as db:
            return int((await db.execute(query)).scalar_one())

    # -- for the runner --------------------------------------------------------------------------------------

    async def claim_across_tenants(self, lease: dt.timedelta) -> Batch | None:
        """Take a batch that nobody runs, the oldest first; its lines that were running wait again."""
        free = sa.or_(batch.c.runner.is_(None), batch.c.runner_until < _NOW)
        oldest = (
            sa.select(batch.c.id)
            .where(batch.c.status.in_(OPEN), free)
            .order_by(batch.c.created_at)
            .limit(1)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        take = (
            sa.update(batch)
            .where(batch.c.id == oldest)
            .values(runner=self._runner, runner_until=_NOW + lease)
            .returning(*batch.c)
        )
        async with self._engine.begin() as db:
            row = (await db.execute(take)).mappings().one_or_none()
            if row is None:
                return None
            running = (batch_line.c.batch_id == row["id"]) & (batch_line.c.state == "running")
            await db.execute(sa.update(batch_line).where(running).values(state="waiting"))
        return _batch(row)

    async def extend(self, tenant: str, batch_id: str, lease: dt.timedelta) -> Batch:
        """Hold a batch for longer and return it as it stands. Raises RunnerReplaced."""
        async with self._engine.begin() as db:
            return await self._change(db, tenant, batch_id, {"runner_until": _NOW + lease})

    async def release_across_tenants(self) -> None:
        """Let go of every batch that this gateway runs."""
        async with self._engine.begin() as db:
            await db.execute(
                sa.update(batch)
                .where(batch.c.runner == self._runner, batch.c.status.in_(OPEN))
                .values(runner=None, runner_until=None)
            )

    async def reject(self, tenant: str, batch_id: str, errors: Sequence[LineError]) -> None:
        """End a batch that does not run: its input or its key is not what it should be. Raises RunnerReplaced."""
        values = {"status": "failed", "errors": msgspec.to_builtins(errors), "ended_at": _NOW}
        async with self._engine.begin() as db:
            await db.execute(sa.delete(batch_line).where(batch_line.c.batch_id == batch_id))
            await self._change(db, tenant, batch_id, values)

    async def accept(self, tenant: str, batch_id: str, lines: AsyncIterator[Line]) -> Batch:
        """Write all lines of a batch that was validated, and begin it. Raises RunnerReplaced."""
        async with self._engine.begin() as db:
            await db.execute(sa.delete(batch_line).where(batch_line.c.batch_id == batch_id))
            rows: list[dict[str, Any]] = []
            total = 0
            async for line in lines:
                rows.append({"batch_id": batch_id, **msgspec.structs.asdict(line)})
                total += 1
                if len(rows) == INSERT_ROWS:
                    await db.execute(sa.insert(batch_line), rows)
                    rows.clear()
            if rows:
                await db.execute(sa.insert(batch_line), rows)
            status = sa.case((batch.c.status == "validating", "in_progress"), else_=batch.c.status)
            values = {"status": status, "total": total, "in_progress_at": _NOW}
            return await self._change(db, tenant, batch_id, values)

    async def take_line(self, tenant: str, batch_id: str, rid: str) -> LineRow | None:
        """Return the next waiting line, which runs from here on as `rid`. Raises RunnerReplaced.

        A line that ran before keeps the id that it had then.
        """
        next_line = (
            sa.select(batch_line.c.line)
            .where(batch_line.c.batch_id == batch_id, batch_line.c.state == "waiting")
            .order_by(batch_line.c.line)
            .limit(1)
            .scalar_subquery()
        )
        take = (
            sa.update(batch_line)
            .where(batch_line.c.batch_id == batch_id, batch_line.c.line == next_line)
            .values(state="running", rid=sa.case((batch_line.c.rid == "", rid), else_=batch_line.c.rid))
            .returning(*batch_line.c)
        )
        async with self._engine.begin() as db:
            await self._change(db, tenant, batch_id, {})
            row = (await db.execute(take)).mappings().one_or_none()
        return None if row is None else _line(row)

    async def rename_line(self, tenant: str, batch_id: str, line: int, rid: str) -> None:
        """Say that a line runs again, as `rid`. Raises RunnerReplaced."""
        mine = (batch_line.c.batch_id == batch_id) & (batch_line.c.line == line)
        async with self._engine.begin() as db:
            await self._change(db, tenant, batch_id, {})
            await db.execute(sa.update(batch_line).where(mine).values(rid=rid))

    async def finish_line(
        self, tenant: str, batch_id: str, line: int, *, ok: bool, rid: str, http_status: int, answer: bytes
    ) -> None:
        """Keep how a line went. Raises RunnerReplaced."""
        count = {"completed": batch.c.completed + 1} if ok else {"failed": batch.c.failed + 1}
        change = (
            sa.update(batch_line)
            .where(batch_line.c.batch_id == batch_id, batch_line.c.line == line)
            .values(state="done" if ok else "failed", rid=rid, http_status=http_status, answer=answer)
        )
        async with self._engine.begin() as db:
            await self._change(db, tenant, batch_id, count)
            await db.execute(change)

    async def finalizing(self, tenant: str, batch_id: str) -> Batch:
        """Say that a batch whose lines have all ended writes its files. Raises RunnerReplaced."""
        status = sa.case((batch.c.status == "in_progress", "finalizing"), else_=batch.c.status)
        async with self._engine.begin() as db:
            return await self._change(db, tenant, batch_id, {"status": status, "finalizing_at": _NOW})

    async def read_lines(self, db: AsyncConnection, batch_id: str, *, after: int, limit: int) -> Sequence[LineRow]:
        """Return lines in the caller's transaction, which has found the batch to be its own."""
        query = (
            sa.select(batch_line)
            .where(batch_line.c.batch_id == batch_id, batch_line.c.line > after)
            .order_by(batch_line.c.line)
            .limit(limit)
        )
        return [_line(row) for row in (await db.execute(query)).mappings().all()]

    async def end(
        self,
        db: AsyncConnection,
        ended: Batch,
        *,
        status: str,
        output_file_id: str | None,
        error_file_id: str | None,
        error: LineError | None,
    ) -> None:
        """End a batch in the transaction that wrote its files. Raises RunnerReplaced."""
        values = {
            "status": status,
            "output_file_id": output_file_id,
            "error_file_id": error_file_id,
            "failed": batch.c.total - batch.c.completed,
            "errors": [] if error is None else [msgspec.to_builtins(error)],
            "ended_at": _NOW,
        }
        await self._change(db, ended.organisation_id, ended.id, values)
        await db.execute(sa.delete(batch_line).where(batch_line.c.batch_id == ended.id))

    async def _change(self, db: AsyncConnection, tenant: str, batch_id: str, values: Mapping[str, Any]) -> Batch:
        """Change a batch of ours and return it."""
        mine = (batch.c.organisation_id == tenant) & (batch.c.id == batch_id) & (batch.c.runner == self._runner)
        change = sa.update(batch).where(mine).values(**({"runner": self._runner} | dict(values))).returning(*batch.c)
        row = (await db.execute(change)).mappings().one_or_none()
        if row is None:
            raise RunnerReplaced(batch_id)
        return _batch(row)


def _batch(row: sa.RowMapping) -> Batch:
    fields = {name: row[name] for name in Batch.__struct_fields__}
    return Batch(**(fields | {"errors": msgspec.convert(row["errors"], list[LineError])}))


def _line(row: sa.RowMapping) -> LineRow:
    return LineRow(**{name: row[name] for name in LineRow.__struct_fields__})
