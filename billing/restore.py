"""Usage that was lost with Redis' data, restored from the workers' journals.

A worker writes its final counts, who pays, and the gateway's acknowledgement to a journal on its own disk as well as to
Redis. `restore` reads such journals back:

1. Every record becomes a cost row, if it is not one.
2. A request of which an attempt finished and was acknowledged by its gateway, and that is neither billed nor waits in a
   stream, gets the usage event that was lost: the worker's counts at the price that the client was told.
3. If it is still reserved (a replica that lagged was promoted: the reservation came back, not its settlement), it is
   settled by the settle script with these counts, once its answer ended `SETTLED_WITHIN_MS` ago: whoever else
   would settle it has had the time, and whoever comes later changes nothing.
4. Posting is by request id, so restoring again, or a settlement that comes late, posts nothing twice.

What neither finished nor was acknowledged stays free, as if the gateway had died.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from contracts.identity import NUM_SHARDS, shard_of
from contracts.lifecycle import FinishReason, Phase
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
    records: list[AttemptRecord] = []
    delivered: set[tuple[str, int, int]] = set()
    unreadable = 0
    for line in _lines(folder):
        try:
            if line.startswith(b'{"delivered"'):
                mark = _MARK.decode(line)
                delivered.add((mark.delivered, mark.attempt, mark.sample))
            else:
                records.append(_RECORD.decode(line))
        except msgspec.DecodeError:
            unreadable += 1
    return Journals(records=records, delivered=frozenset(delivered), unreadable=unreadable)


def lost_usage(journals: Journals) -> Mapping[str, UsageEvent]:
    """Return the usage event of every request that finished and reached its gateway, by request id. Pure."""
    by_request: dict[str, list[AttemptRecord]] = {}
    for record in journals.records:
        by_request.setdefault(record.rid, []).append(record)
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
    cost_rows = 0
    lean = [msgspec.structs.replace(record, payer="") for record in journals.records]
    for start in range(0, len(lean), _BATCH):
        prepared = await sink.prepare([encode(record) for record in lean[start : start + _BATCH]])
        good = [one for one in prepared if not isinstance(one, Poison)]
        cost_rows += await sink.write(good) if good else 0
    lost = dict(lost_usage(journals))
    for rid in await _waiting(redis):
        lost.pop(rid, None)
    for rid in await _billed(engine, lost):
        lost.pop(rid, None)
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


async def _restored(redis: Redis, scripts: SettlementScripts, event: UsageEvent, *, young: bool) -> bool:
    """Write one usage event, unless somebody is to settle the request or has; return whether it was written."""
    if not await redis.exists(keys.reservation(event.org, event.rid)):
        await redis.xadd(keys.usage_stream(shard_of(event.org)), {FIELD: encode(event)})
    elif young or not await scripts.settle(event, actual_usage(event)):
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


async def _billed(engine: AsyncEngine, lost: Mapping[str, UsageEvent]) -> Sequence[str]:
    if not lost:
        return ()
    ids = [decode_request_id(rid) for rid in lost]
    moments = [moment(request_id.int >> 80) for request_id in ids]
    query = sa.select(t.request.c.request_id).where(
        t.request.c.request_id.in_(ids), t.request.c.at.between(min(moments), max(moments))
    )
    async with engine.connect() as conn:
        return [str(found) for found in (await conn.execute(query)).scalars()]


def _lines(folder: Path) -> Iterator[bytes]:
    for path in _files(folder):
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield line.strip()


def _files(folder: Path) -> Iterable[Path]:
    return sorted(folder.rglob("attempts-*.jsonl*"))
