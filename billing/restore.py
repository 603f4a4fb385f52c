"""Usage that was lost with Redis' data, restored from the workers' journals.

A worker writes its final counts, who pays, and the gateway's acknowledgement to a journal on its own disk as well as to
Redis. `restore` takes what such journals say, in a folder or said again by the workers (`billing.retold`):

1. Every record becomes a cost row, if it is not one.
2. A request of which an attempt finished and was acknowledged by its gateway, and that is neither billed nor waits in a
   stream, is settled by the settle script: the worker's counts at the price that the client was told.
3. If it is still reserved (the reservation came back, not its settlement), that is done once its answer ended
   `settled_within_ms` ago: whoever else would settle it has had the time.
4. Settlement is once per request, and so is posting: restoring again, or a settlement that comes late, changes nothing.

What neither finished nor was acknowledged stays free, as if the gateway had died.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import sqlalchemy as sa
import structlog
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import tables as t
from billing.attempts import AttemptSink
from billing.events import Poison, decode_event, decode_request_id
from billing.moments import moment
from contracts import keys
from contracts.identity import NUM_SHARDS
from contracts.lifecycle import FinishReason, Phase
from contracts.lifecycle import Path as ServingPath
from contracts.rating import Tokens
from contracts.settlement import SettlementScripts, actual_usage, decode_owner, usage_event_of
from contracts.usage import AttemptRecord, DeliveredMark, Outcome, UsageEvent
from contracts.wire import FIELD, encode

log: Final = structlog.get_logger()

_RECORD: Final = msgspec.json.Decoder(AttemptRecord)
_MARK: Final = msgspec.json.Decoder(DeliveredMark)
_PAGE: Final = 1000
SETTLED_WITHIN_MS: Final = 60_000
_BATCH: Final = 500


class Journals(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers' journals say. `delivered`: (rid, attempt, sample)."""

    records: Sequence[AttemptRecord]
    delivered: frozenset[tuple[str, int, int]]
    unreadable: int  # lines; a torn last one is usual after a power cut


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What was done. `requests`: those whose usage event was written again; `cost_nano`: of these."""

    records: int
    unreadable: int
    cost_rows: int
    requests: tuple[str, ...]
    cost_nano: int


def read_journals(folder: Path) -> Journals:
    """Return what all journals below a folder say. Raises OSError."""
    return journals_of(_lines(folder))


def journals_of(lines: Iterable[bytes]) -> Journals:
    """Return what lines of journals say."""
    records: list[AttemptRecord] = []
    delivered: set[tuple[str, int, int]] = set()
    unreadable = 0
    for line in lines:
        try:
            if line.startswith(b'{"delivered"'):
                mark = _MARK.decode(line)
                delivered.add((mark.delivered, mark.attempt, mark.sample))
            else:
                records.append(_RECORD.decode(line))
        except msgspec.DecodeError:
            unreadable += 1
    return Journals(records=records, delivered=frozenset(delivered), unreadable=unreadable)


def lost_usage(journals: Journals, known: Iterable[AttemptRecord] = ()) -> Mapping[str, UsageEvent]:
    """Return the usage event of every request that finished and reached its gateway, by request id. Pure.

    `known`: counts that billing has of them already, a prompt's of minutes ago perhaps.
    """
    by_request: dict[str, list[AttemptRecord]] = {}
    told = set()
    for record in journals.records:
        by_request.setdefault(record.rid, []).append(record)
        told.add((record.rid, record.attempt, record.sample, record.phase))
    for record in known:
        if record.rid in by_request and (record.rid, record.attempt, record.sample, record.phase) not in told:
            by_request[record.rid].append(record)
    found = {}
    for rid, records in by_request.items():
        event = _event(rid, records, journals.delivered)
        if event is not None:
            found[rid] = event
    return found


async def restore(
    engine: AsyncEngine,
    redis: Redis,
    sink: AttemptSink,
    journals: Journals,
    *,
    settled_within_ms: int = SETTLED_WITHIN_MS,
) -> Restored:
    """Write again what is missing. Raises RedisError, SQLAlchemyError, OSError."""
    cost_rows = await restore_cost_rows(sink, journals.records)
    missing = await unbilled(engine, redis, {rid for rid, _, _ in journals.delivered})
    lost = dict(lost_usage(journals, await _known(engine, missing)))
    for rid in lost.keys() - missing:
        del lost[rid]
    old_ms = int(time.time() * 1000) - settled_within_ms
    young = {record.rid for record in journals.records if record.ended_unix_ms > old_ms}
    scripts = SettlementScripts(redis)
    for rid, event in tuple(lost.items()):
        if not await _restored(redis, scripts, event, young=rid in young):
            del lost[rid]
    return Restored(
        records=len(journals.records),
        unreadable=journals.unreadable,
        cost_rows=cost_rows,
        requests=tuple(sorted(lost)),
        cost_nano=sum(event.cost for event in lost.values()),
    )


async def restore_cost_rows(sink: AttemptSink, records: Sequence[AttemptRecord]) -> int:
    """Write the workers' counts that are not there; return how many. Raises SQLAlchemyError, OSError."""
    written = 0
    lean = [msgspec.structs.replace(record, payer="") for record in records]
    for start in range(0, len(lean), _BATCH):
        prepared = await sink.prepare([encode(record) for record in lean[start : start + _BATCH]])
        good = [one for one in prepared if not isinstance(one, Poison)]
        written += await sink.write(good) if good else 0
    return written


async def unbilled(engine: AsyncEngine, redis: Redis, rids: AbstractSet[str]) -> AbstractSet[str]:
    """Return those that are neither billed nor wait in a stream. Raises RedisError, SQLAlchemyError."""
    if not rids:
        return frozenset()
    left = rids - await _billed(engine, rids)
    return left - await _waiting(redis) if left else left


async def _restored(redis: Redis, scripts: SettlementScripts, event: UsageEvent, *, young: bool) -> bool:
    """Settle one request, unless somebody is to settle it or has; return whether that was done."""
    if young and await redis.exists(keys.reservation(event.org, event.rid)):
        return False
    if not await scripts.settle(event, actual_usage(event)):
        return False
    log.warning("usage_restored", rid=event.rid, org=event.org, cost_nano=event.cost)
    return True


def _event(rid: str, records: Sequence[AttemptRecord], delivered: frozenset[tuple[str, int, int]]) -> UsageEvent | None:
    try:
        decode_request_id(rid)
    except Poison:
        return None
    answers = _delivered_answers(rid, records, delivered)
    payer = next((one.payer for one in answers if one.payer), "")
    if not payer:
        return None
    last = answers[0].attempt
    owner = decode_owner(payer)
    prompts = [one for one in records if one.sample == 0 and one.phase != Phase.DECODE and one.prompt_tokens]
    source = min(prompts or answers, key=lambda one: one.attempt)  # the first attempt that finished prefill
    cached = min(source.cached_tokens, source.prompt_tokens)
    tokens = Tokens(
        prefill_computed=source.prompt_tokens - cached,
        prefill_cached=cached,
        # A continuation's prompt holds what was answered before it.
        decode=sum(one.completion_tokens + max(0, one.prompt_tokens - source.prompt_tokens) for one in answers),
    )
    return usage_event_of(
        owner,
        rid=rid,
        pool=answers[0].pool,
        outcome=Outcome.FINISHED,
        tokens=tokens,
        cause="restored",
        finish_reason=answers[0].reason,
        path=ServingPath.PD if answers[0].phase == Phase.DECODE else ServingPath.UNIFIED,
        attempts=last,
        estimated=last > 1,
        prefill_worker="" if source in answers else source.worker_id,
        decode_worker=answers[0].worker_id,
        settled_by="billing",
    )


def _delivered_answers(
    rid: str, records: Sequence[AttemptRecord], delivered: frozenset[tuple[str, int, int]]
) -> Sequence[AttemptRecord]:
    """Return the records of the last attempt whose whole answer its gateway acknowledged; none without one.

    A scheduler that reads an old replica may have begun another attempt after it, which nobody wanted.
    """
    for attempt in sorted({record.attempt for record in records}, reverse=True):
        answers = [one for one in records if one.attempt == attempt and one.phase != Phase.PREFILL]
        whole = all(FinishReason(one.reason).complete and (rid, attempt, one.sample) in delivered for one in answers)
        if answers and whole:
            return answers
    return ()


async def _waiting(redis: Redis) -> frozenset[str]:
    """Return the ids of requests whose events are in a stream, dead letters too."""
    found: set[str] = set()
    for shard in range(NUM_SHARDS):
        for stream in (keys.usage_stream(shard), keys.dead_letters(shard)):
            start = "-"
            while True:
                page: Any = await redis.xrange(stream, min=start, count=_PAGE)
                for _, fields in page:
                    try:
                        found.add(decode_event(fields.get(FIELD.encode(), b"")).event.rid)
                    except Poison:
                        continue
                if len(page) < _PAGE:
                    break
                start = f"({page[-1][0].decode()}"
    return frozenset(found)


async def _billed(engine: AsyncEngine, rids: AbstractSet[str]) -> AbstractSet[str]:
    found: set[str] = set()
    async with engine.connect() as conn:
        for condition in _among(t.request.c.request_id, t.request.c.at, rids):
            found |= {
                str(one) for one in (await conn.execute(sa.select(t.request.c.request_id).where(condition))).scalars()
            }
    return found


async def _known(engine: AsyncEngine, rids: AbstractSet[str]) -> Sequence[AttemptRecord]:
    """Return the cost rows of some requests."""
    table = t.attempt_cost
    found: list[AttemptRecord] = []
    async with engine.connect() as conn:
        for condition in _among(table.c.request_id, table.c.at, rids):
            found += [_record(row) for row in await conn.execute(sa.select(table).where(condition))]
    return found


def _among(
    request_id: sa.ColumnElement[uuid.UUID], at: sa.ColumnElement[datetime], rids: AbstractSet[str]
) -> Iterator[sa.ColumnElement[bool]]:
    """Yield conditions that together find some requests, each in the partitions of their days."""
    ids = []
    for rid in rids:
        with suppress(Poison):  # no id of a request: there is no row of it
            ids.append(decode_request_id(rid))
    ids.sort()  # by their time
    for start in range(0, len(ids), _PAGE):
        page = ids[start : start + _PAGE]
        yield request_id.in_(page) & at.between(moment(page[0].int >> 80), moment(page[-1].int >> 80))


def _record(row: Any) -> AttemptRecord:
    return AttemptRecord(
        rid=str(row.request_id),
        attempt=row.attempt,
        sample=row.sample,
        phase=row.phase,
        worker_id=row.worker,
        worker_epoch=row.worker_epoch,
        pool=row.pool,
        reason=row.reason,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        compute_ms=row.compute_ms,
        ended_unix_ms=int(row.ended_at.timestamp() * 1000),
    )


def _lines(folder: Path) -> Iterator[bytes]:
    for path in _files(folder):
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield line.strip()


def _files(folder: Path) -> Iterable[Path]:
    return sorted(folder.rglob("attempts-*.jsonl*"))
