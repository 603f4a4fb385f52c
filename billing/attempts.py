"""The workers' own final counts: our cost rows, and the independent figure of `pdgate reconcile`."""

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.database import driver_connection
from billing.events import Poison, decode_request_id
from billing.moments import moment
from billing.partitions import Partitions
from contracts import keys
from contracts.usage import AttemptRecord

_decoder: Final = msgspec.msgpack.Decoder(AttemptRecord)

_INSERT: Final = """
INSERT INTO billing.attempt_cost (request_id, attempt, sample, phase, at, pool, worker, worker_epoch, reason,
    prompt_tokens, cached_tokens, completion_tokens, compute_ms, ended_at, worker_ms, kv_byte_s)
SELECT * FROM unnest($1::uuid[], $2::integer[], $3::integer[], $4::text[], $5::timestamptz[], $6::text[], $7::text[],
    $8::bigint[], $9::text[], $10::bigint[], $11::bigint[], $12::bigint[], $13::double precision[], $14::timestamptz[],
    $15::double precision[], $16::double precision[])
ON CONFLICT DO NOTHING
"""


class Ended(msgspec.Struct, frozen=True):
    """One engine request as its worker counted it."""

    record: AttemptRecord
    request_id: uuid.UUID
    at: datetime
    ended_at: datetime

    @property
    def key(self) -> tuple[uuid.UUID, int, int, str]:
        """What makes the row unique."""
        return self.request_id, self.record.attempt, self.record.sample, self.record.phase


def attempt_streams(pools: Sequence[str]) -> dict[str, str]:
    """Return every pool's attempts stream and its dead-letter stream."""
    return {keys.attempts(pool): keys.attempts_dead_letters(pool) for pool in pools}


class AttemptSink:
    """Writes attempt records; the first one of an engine request stays."""

    def __init__(self, engine: AsyncEngine, partitions: Partitions) -> None:
        self._engine = engine
        self._partitions = partitions

    async def prepare(self, raws: Sequence[bytes]) -> list[Ended | Poison]:
        """Return each record with its times, or why it can never be written."""
        decoded = [_decoded(raw) for raw in raws]
        days = {one.at.date() for one in decoded if isinstance(one, Ended)}
        missing = days - await self._partitions.writable(days)
        return [
            Poison("outside_partitions", f"request {one.request_id} of {one.at}")
            if isinstance(one, Ended) and one.at.date() in missing
            else one
            for one in decoded
        ]

    async def write(self, things: Sequence[Ended]) -> int:
        """Write the records that are not there yet."""
        unique = sorted({one.key: one for one in reversed(things)}.values(), key=lambda one: one.key)
        async with driver_connection(self._engine) as connection:
            status = await connection.execute(_INSERT, *zip(*map(_row, unique), strict=True))
        return int(status.rsplit(" ", 1)[1])


def _decoded(raw: bytes) -> Ended | Poison:
    try:
        record = _decoder.decode(raw)
        request_id = decode_request_id(record.rid)
        return Ended(record, request_id, moment(request_id.int >> 80), moment(record.ended_unix_ms))
    except Poison as poison:
        return poison
    except (msgspec.DecodeError, OverflowError) as error:
        return Poison("undecodable", str(error))


def _row(one: Ended) -> tuple[Any, ...]:
    record = one.record
    return (
        one.request_id,
        record.attempt,
        record.sample,
        record.phase,
        one.at,
        record.pool,
        record.worker_id,
        record.worker_epoch,
        record.reason,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.compute_ms,
        one.ended_at,
        record.worker_ms,
        record.kv_byte_s,
    )
