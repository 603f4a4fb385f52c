"""Finding one request of an organisation: running here, just settled, or billed."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import queries
from contracts import keys
from contracts.errors import DependencyDown, NotFound
from contracts.identity import at_ms
from contracts.slo import Timings
from contracts.usage import UNPAID, Outcome, UsageEvent
from gateway.auth import DATABASE_ERRORS
from gateway.generation import Generation
from gateway.schemas.answers import (
    CompletionDetails,
    MeterRow,
    PromptDetails,
    RequestTimings,
    RequestView,
    Usage,
    meters_of,
    money_text,
    usage_of,
)
from gateway.table import LiveTable
from gateway.tenant_read import tenant_read

ANSWER_PREFIX: Final = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)")
"""What the ids of answers put before the request's id."""

_REDIS_TIMEOUT_S: Final = 2.0
_RID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_decoder = msgspec.msgpack.Decoder(UsageEvent)


class Lookup:
    """Reads requests. A request of another organisation is as unknown as one that never was."""

    def __init__(self, table: LiveTable, redis: Redis, engine: AsyncEngine, *, currency: str) -> None:
        self._table = table
        self._redis = redis
        self._engine = engine
        self._currency = currency

    async def find(self, tenant: str, name: str) -> RequestView:
        """Return the tenant's request of this id, with or without what its answer's id puts before it.

        Raises:
            NotFound: unknown to this tenant.
            DependencyDown: neither Redis nor Postgres could be asked.
        """
        rid = rid_of(name)
        if rid is None:
            raise _unknown(name)
        created_s = at_ms(rid) // 1000
        generation = self._table.find(rid)
        if generation is not None and generation.terms.owner.org == tenant:
            return self._running(generation, created_s)
        event = await self._settled(tenant, rid)
        if event is not None:
            return self._of_event(event, created_s)
        row = await self._billed(tenant, rid)
        if row is None:
            raise _unknown(name)
        return self._of_row(row)

    async def was_paid(self, tenant: str, rid: str) -> bool | None:
        """Return whether a request's tenant pays for it; None: it runs, or is not settled.

        Raises:
            DependencyDown: Redis or PostgreSQL could not be asked.
        """
        if self._table.find(rid) is not None:
            return None
        event = await self._settled(tenant, rid)
        if event is not None:
            return event.billable
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                reserved: Any = await self._redis.exists(keys.reservation(tenant, rid))
        except (RedisError, OSError):
            raise DependencyDown("Running requests cannot be looked up right now.", retry_after_s=2) from None
        if reserved:
            return None
        row = await self._billed(tenant, rid)
        return row is not None and Outcome(row.outcome).billable and row.cause not in UNPAID

    async def _billed(self, tenant: str, rid: str) -> queries.RequestRow | None:
        try:
            async with tenant_read(self._engine, tenant) as db:
                return await queries.find_request(db, tenant, rid)
        except DATABASE_ERRORS:
            raise DependencyDown("Past requests cannot be read right now.", retry_after_s=2) from None

    async def _settled(self, tenant: str, rid: str) -> UsageEvent | None:
        try:
            answer: Any = self._redis.get(keys.settled_request(tenant, rid))
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                raw = await answer
        except (RedisError, OSError):
            return None
        return _decoder.decode(raw) if raw is not None else None

    def _running(self, generation: Generation, created_s: int) -> RequestView:
        terms, placed = generation.terms, generation.placed
        return RequestView(
            id=terms.rid,
            model=terms.owner.model,
            status="running" if generation.accepted else "queued",
            created=created_s,
            organisation=terms.owner.org,
            project=terms.owner.project,
            key_id=terms.owner.key_id,
            pool=terms.pool,
            tier=terms.owner.tier,
            stream=terms.stream,
            path=placed.path if placed else None,
            hand_off=placed.hand_off if placed else None,
            attempts=max(1, generation.attempt),
            prefill_worker=placed.prefill.worker_id if placed and placed.prefill else "",
            decode_worker=placed.decode.worker_id if placed else "",
            currency=self._currency,
            price_version=terms.owner.price.version,
            simulated=terms.owner.simulated,
            user=terms.owner.dimensions.user,
            tags=terms.owner.dimensions.tags,
            reference=terms.owner.dimensions.reference,
        )

    def _of_event(self, event: UsageEvent, created_s: int) -> RequestView:
        seen = event.timings
        return RequestView(
            id=event.rid,
            model=event.model,
            status=event.outcome.value,
            created=created_s,
            organisation=event.org,
            project=event.project,
            key_id=event.key_id,
            pool=event.pool,
            tier=event.tier,
            stream=event.stream,
            finish_reason=event.finish_reason,
            cause=event.cause,
            path=event.path,
            hand_off=event.hand_off,
            attempts=event.attempts,
            prefill_worker=event.prefill_worker,
            decode_worker=event.decode_worker,
            usage=usage_of(event),
            meters=meters_of(event),
            cost=money_text(event.cost),
            cost_nano=event.cost,
            currency=self._currency,
            price_version=event.price.version,
            estimated=event.estimated,
            simulated=event.simulated,
            slo_met=event.slo_met,
            settled_by=event.settled_by,
            user=event.dimensions.user,
            tags=event.dimensions.tags,
            reference=event.dimensions.reference,
            timings=None if seen is None else _timings(seen),
        )

    def _of_row(self, row: queries.RequestRow) -> RequestView:
        return RequestView(
            id=row.request_id,
            model=row.model,
            status=row.outcome,
            created=row.at_ms // 1000,
            organisation=row.organisation,
            project=row.project,
            key_id=row.key_id,
            pool=row.pool,
            tier=row.tier,
            stream=row.stream,
            finish_reason=row.finish_reason,
            cause=row.cause,
            path=row.path,
            hand_off=row.hand_off,
            attempts=row.attempts,
            prefill_worker=row.prefill_worker,
            decode_worker=row.decode_worker,
            usage=_usage_of_rows(row),
            meters=_meters_of_rows(row.meters),
            cost=money_text(row.cost),
            cost_nano=row.cost,
            currency=self._currency,
            price_version=row.price_version,
            estimated=row.estimated,
            simulated=row.simulated,
            slo_met=row.slo_met,
            settled_by=row.settled_by,
            user=row.end_user or "",
            tags=msgspec.json.decode(row.tags, type=dict[str, str]) if row.tags else {},
            reference=row.reference or "",
            timings=None if row.timings is None else _timings(row.timings),
        )


def rid_of(name: str) -> str | None:
    """Return the request's id in its own name or its answer's; None = it is neither."""
    rid = ANSWER_PREFIX.sub("", name, count=1) if ANSWER_PREFIX.match(name) else name
    return rid if _RID.fullmatch(rid) else None


def _unknown(name: str) -> NotFound:
    return NotFound(f"No request '{name}' of this organisation.", param="id")


def _timings(seen: Timings) -> RequestTimings:
    return RequestTimings(
        ttft_ms=seen.ttft_ms,
        tpot_ms=seen.tpot_ms,
        total_ms=seen.total_ms,
        queue_ms=seen.queue_ms,
        prefill_ms=seen.prefill_ms,
        transfer_ms=seen.transfer_ms,
    )


def _meters_of_rows(rows: Sequence[queries.MeterRow]) -> list[MeterRow]:
    return [
        MeterRow(
            meter=row.meter,
            tokens=row.tokens,
            price=money_text(row.price),
            cost=money_text(row.cost),
            cost_nano=row.cost,
            worker=row.worker,
        )
        for row in rows
    ]


def _usage_of_rows(row: queries.RequestRow) -> Usage:
    tokens = {meter.meter: meter.tokens for meter in row.meters}
    cached, decode = tokens.get("prefill_cached", 0), tokens.get("decode", 0)
    prompt = tokens.get("prefill_computed", 0) + cached
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=decode,
        total_tokens=prompt + decode,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(reasoning_tokens=row.reasoning_tokens),
    )
