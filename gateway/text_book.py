"""Stored prompts and answers: the only file with SQL on `tenancy.stored_text`, and the consent that it hangs on.

`organisation.texts_since` is the consent: NULL = nothing is stored. Only what arrived after it is written or shown, so
the moment it is withdrawn (or given anew) everything older is out of reach, before a single row is deleted; who writes
locks the organisation's row, so nothing is written after a withdrawal either. `sweep` deletes.
"""

import datetime as dt
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.errors import NotFound
from contracts.identity import at_ms
from gateway.audit import record
from gateway.schemas.choices import Choice
from gateway.tables import organisation
from gateway.tenant_read import tenant_read
from gateway.tenants import NoSuchTenant
from gateway.text_tables import stored_text

DEFAULT_DAYS: Final = 30
MOST_DAYS: Final = 365
SWEEP_ROWS: Final = 500
_LOCK: Final = 0x70646761_74650007  # advisory lock: one gateway deletes at a time

_IN_FORCE: Final = sa.and_(
    stored_text.c.at >= organisation.c.texts_since,
    stored_text.c.at >= sa.func.now() - sa.func.make_interval(0, 0, 0, organisation.c.texts_days),
)
_SWEEP: Final = sa.text(
    """
    DELETE FROM tenancy.stored_text gone USING (
        SELECT old.organisation_id, old.request_id
        FROM tenancy.organisation o CROSS JOIN LATERAL (
            SELECT t.organisation_id, t.request_id FROM tenancy.stored_text t
            WHERE t.organisation_id = o.id AND t.at < CASE
                WHEN o.texts_since IS NULL THEN 'infinity'
                ELSE greatest(o.texts_since, now() - make_interval(days => o.texts_days))
            END
            LIMIT :rows
        ) old LIMIT :rows
    ) expired
    WHERE gone.organisation_id = expired.organisation_id AND gone.request_id = expired.request_id
    """
)


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt and answer of one request that ended."""

    org: str
    rid: str
    asked_with: str  # the request whose text holds the prompt
    prompt: bytes
    prompt_cut: bool
    answer: bytes
    answer_cut: bool
    broken: str

    @property
    def num_bytes(self) -> int:
        """Return what it weighs."""
        return len(self.prompt) + len(self.answer)


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an organisation has prompts and answers stored, and how much there is."""

    since: dt.datetime | None
    days: int
    num_requests: int
    num_bytes: int


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """What was stored of one request."""

    rid: str
    prompt: str  # the body as the client sent it
    prompt_cut: bool
    answers: Sequence[Choice]
    answer_cut: bool
    broken: str
    expires_at: dt.datetime


_answers: Final = msgspec.json.Decoder(list[Choice])


class TextBook:
    """Repository of stored texts. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def consent(self, tenant: str) -> Consent:
        """Return what an organisation has stored. Raises NoSuchTenant."""
        mine = sa.select(organisation.c.texts_since, organisation.c.texts_days).where(organisation.c.id == tenant)
        size = sa.func.octet_length(stored_text.c.prompt) + sa.func.octet_length(stored_text.c.answer)
        total = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(size), 0)).select_from(
            stored_text.join(organisation)
        )
        async with tenant_read(self._engine, tenant) as db:
            row = (await db.execute(mine)).one_or_none()
            if row is None:
                raise NoSuchTenant(tenant)
            num, num_bytes = (await db.execute(total.where(_of(tenant), _IN_FORCE))).one()
        return Consent(since=row.texts_since, days=row.texts_days, num_requests=num, num_bytes=int(num_bytes))

    async def give(self, tenant: str, *, days: int, actor: str) -> None:
        """Have texts stored from now on, for `days`; who has them stored already keeps those. Raises NoSuchTenant."""
        values = {
            "texts_since": sa.func.coalesce(organisation.c.texts_since, sa.func.clock_timestamp()),
            "texts_days": days,
        }
        await self._set(tenant, values, actor=actor, action="texts_stored", detail={"days": days})

    async def withdraw(self, tenant: str, *, actor: str) -> None:
        """Have nothing stored from now on, and nothing shown of what is. `sweep` deletes it. Raises NoSuchTenant."""
        await self._set(tenant, {"texts_since": None}, actor=actor, action="texts_withdrawn", detail={})

    async def add(self, texts: Sequence[Text]) -> int:
        """Write texts of organisations that consent; return how many were."""
        wanted = sorted({text.org for text in texts})
        consents = sa.select(organisation.c.id, organisation.c.texts_since).where(
            organisation.c.id.in_(wanted), organisation.c.texts_since.is_not(None)
        )
        async with self._engine.begin() as db:
            rows = await db.execute(consents.order_by(organisation.c.id).with_for_update(read=True))
            since = {row.id: row.texts_since for row in rows}
            found = [_row(text) for text in texts if text.org in since and _moment(text.rid) >= since[text.org]]
            if found:
                await db.execute(insert(stored_text).on_conflict_do_nothing(), found)
        return len(found)

    async def find(self, tenant: str, rid: str) -> Talk | None:
        """Return what is stored of a request of this organisation; None = nothing, or not any more."""
        asked = stored_text.alias("asked")
        same = sa.and_(
            asked.c.organisation_id == stored_text.c.organisation_id, asked.c.request_id == stored_text.c.asked_with
        )
        query = (
            sa.select(
                stored_text,
                asked.c.prompt.label("asked_prompt"),
                asked.c.prompt_cut.label("asked_cut"),
                organisation.c.texts_days,
            )
            .select_from(stored_text.join(organisation).join(asked, same, isouter=True))
            .where(_of(tenant), stored_text.c.request_id == uuid.UUID(rid), _IN_FORCE)
        )
        async with tenant_read(self._engine, tenant) as db:
            row = (await db.execute(query)).mappings().one_or_none()
        if row is None:
            return None
        return Talk(
            rid=rid,
            prompt=(row["asked_prompt"] or b"").decode("utf-8", "replace"),
            prompt_cut=row["asked_cut"] is not False,
            answers=_answers.decode(row["answer"]),
            answer_cut=row["answer_cut"],
            broken=row["broken"],
            expires_at=row["at"] + dt.timedelta(days=row["texts_days"]),
        )

    async def delete(self, tenant: str, rid: str, *, actor: str) -> None:
        """Delete what is stored of one request, and of those that were asked with it. Raises NotFound."""
        request_id = uuid.UUID(rid)
        these = sa.or_(stored_text.c.request_id == request_id, stored_text.c.asked_with == request_id)
        async with self._engine.begin() as db:
            gone = await db.execute(sa.delete(stored_text).where(_of(tenant), these))
            if not gone.rowcount:
                raise NotFound(f"Nothing is stored of the request '{rid}'.")
            await record(db, actor=actor, action="text_deleted", kind="request", subject=rid, org=tenant)

    async def sweep_across_tenants(self) -> int:
        """Delete up to SWEEP_ROWS rows that are too old or whose consent is withdrawn; return how many there were."""
        async with self._engine.begin() as db:
            mine = await db.execute(sa.select(sa.func.pg_try_advisory_xact_lock(_LOCK)))
            if not mine.scalar_one():
                return 0
            return (await db.execute(_SWEEP, {"rows": SWEEP_ROWS})).rowcount

    async def _set(
        self, tenant: str, values: dict[str, Any], *, actor: str, action: str, detail: dict[str, Any]
    ) -> None:
        async with self._engine.begin() as db:
            changed = await db.execute(sa.update(organisation).where(organisation.c.id == tenant).values(values))
            if not changed.rowcount:
                raise NoSuchTenant(tenant)
            await record(db, actor=actor, action=action, kind="org", subject=tenant, org=tenant, detail=detail)


def _of(tenant: str) -> sa.ColumnElement[bool]:
    return stored_text.c.organisation_id == tenant


def _moment(rid: str) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_ms(rid) / 1000, dt.UTC)


def _row(text: Text) -> dict[str, Any]:
    return {
        "organisation_id": text.org,
        "request_id": uuid.UUID(text.rid),
        "at": _moment(text.rid),
        "asked_with": uuid.UUID(text.asked_with),
        "prompt": text.prompt,
        "prompt_cut": text.prompt_cut,
        "answer": text.answer,
        "answer_cut": text.answer_cut,
        "broken": text.broken,
    }
