"""What is known of one request, put together from where it is written.

1. PostgreSQL: the bill and the workers' own counts, once billing has posted them.
2. Redis: the usage event of a request that is settled but not posted; else its place in the inbox and in flight.
3. The decision log, where there is one: every placement with its reason, and the stage that a miss is blamed on.
   Without it blame is worked out again from the bill's timings, and marked so.
"""

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import (
    AttemptRow,
    MeterRow,
    RequestRow,
    attempts_across_tenants,
    find_request_across_tenants,
)
from contracts import keys
from contracts.catalog import Catalog
from contracts.identity import at_ms
from contracts.rating import Meter, rate
from contracts.slo import SloTarget, Timings
from contracts.usage import UsageEvent
from contracts.wire import FIELD, Inflight, Submit, decode_inbox
from gateway.tables import organisation
from scheduler.policy.blame import Stage, Stamps, blame
from scheduler.policy.decisions import Arrived, Ended, Head, LogError, Placed, Refused, decode

_PREFIX: Final = re.compile(r"^(?:chatcmpl-|cmpl-|msg_|resp_)")
_INBOX_BEFORE_MS: Final = 60_000
"""How much earlier than the gateway's clock Redis' may be."""
_BATCH: Final = 500
_usage: Final = msgspec.msgpack.Decoder(UsageEvent)
_inflight: Final = msgspec.msgpack.Decoder(Inflight)

Status = Literal["queued", "running", "settled", "billed", "refused", "ended"]


class Unknown(LookupError):
    """Nothing is written of this request; the message says where was looked."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A placement: which workers, and why."""

    attempt: int
    path: str
    prefill: str | None
    decode: str
    reason: str
    waited_ms: float | None = None
    hoped_cached_tokens: int | None = None
    predicted_ttft_ms: float | None = None
    predicted_step_ms: float | None = None


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended and what it costs. Money in nano-units."""

    outcome: str
    cause: str
    finish_reason: str
    path: str | None
    hand_off: str | None
    attempts: int
    prefill_worker: str
    decode_worker: str
    timings: Timings | None
    slo_met: bool | None
    estimated: bool
    simulated: bool
    settled_by: str
    cost: int
    meters: tuple[MeterRow, ...]


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one request. What `pdgate why --json` prints."""

    rid: str
    status: Status
    arrived_unix_ms: int
    running_ms: float | None
    """So far, of a request that has not ended."""
    organisation: str
    model: str
    pool: str
    tier: str
    target: SloTarget | None
    currency: str
    decisions: tuple[Decision, ...]
    refused: str
    """Why the scheduler sent it away; empty = it did not."""
    attempts: tuple[AttemptRow, ...]
    blamed: str | None
    """The stage (scheduler.policy.blame.Stage); None = not ended, or not measured."""
    blame_from: Literal["decision_log", "timings"] | None
    bill: Bill | None


class Logged(msgspec.Struct, kw_only=True):
    """What the decision logs hold of one request."""

    pool: str = ""
    targets: dict[str, SloTarget] = {}
    arrived: Arrived | None = None
    placed: list[Placed] = []
    refused: Refused | None = None
    ended: Ended | None = None


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis holds of a request that is not settled."""

    pool: str
    submit: Submit | None
    inflight: Inflight | None


def rid_of(name: str) -> str:
    """Return the request id in the id of an answer, or the id itself. Raises Unknown for what is neither."""
    rid = _PREFIX.sub("", name.strip())
    try:
        at_ms(rid)
    except ValueError:
        raise Unknown(f"{name!r} is no request id: those are UUIDs of version 7, as in x-request-id") from None
    return str(uuid.UUID(rid))


async def story_of(
    rid: str, *, redis: Redis, db: AsyncConnection, catalog: Catalog, decisions: Path | None, now_unix_ms: int = 0
) -> Story:
    """Return what is known of a request.

    Args:
        rid: its id, as `rid_of` returns it.
        redis: of the stack.
        db: of the stack, for reading.
        catalog: names the pools and the targets of the tiers.
        decisions: folder of the decision logs; None = there are none.
        now_unix_ms: 0 = the clock's.

    Raises:
        Unknown: nothing is written of it.
    """
    logged = read_decisions(decisions, rid)
    row = await find_request_across_tenants(db, rid)
    attempts = tuple(await attempts_across_tenants(db, rid))
    event = waiting = None
    if row is None:
        event = await _settled(redis, db, rid, logged)
    if row is None and event is None:
        waiting = await _waiting(redis, catalog, rid)
    if row is None and event is None and waiting is None and logged.arrived is None and not attempts:
        log = f" and the decision logs in {decisions}" if decisions is not None else ""
        raise Unknown(f"request {rid} is unknown: looked in PostgreSQL, Redis{log}")
    bill = _bill_of_row(row) if row is not None else _bill_of_event(event) if event is not None else None
    submit = waiting.submit if waiting is not None else None
    owner = row or event
    tier = owner.tier if owner else submit.owner.tier if submit else logged.arrived.tier if logged.arrived else ""
    model = owner.model if owner else submit.owner.model if submit else ""
    target = _target(logged, submit, catalog, model, tier)
    blamed, blame_from = _blamed(logged, bill, target)
    tenant = logged.arrived.tenant if logged.arrived else ""
    arrived_ms = at_ms(rid)
    over = bill is not None or logged.refused is not None or logged.ended is not None
    return Story(
        rid=rid,
        status=_status(row, event, waiting, logged),
        arrived_unix_ms=arrived_ms,
        running_ms=None if over else max(0, (now_unix_ms or int(time.time() * 1000)) - arrived_ms),
        organisation=_org(row, event) or (submit.owner.org if submit else tenant),
        model=model,
        pool=owner.pool if owner else waiting.pool if waiting else logged.pool,
        tier=tier,
        target=target,
        currency=catalog.currency,
        decisions=_decisions(logged, waiting),
        refused=logged.refused.reason if logged.refused else "",
        attempts=attempts,
        blamed=blamed,
        blame_from=blame_from,
        bill=bill,
    )


def read_decisions(folder: Path | None, rid: str) -> Logged:
    """Return what the decision logs hold of a request; nothing where there is no log."""
    logged = Logged()
    for file in sorted(folder.glob("*.jsonl")) if folder is not None else ():
        _read_log(file, rid, logged)
    logged.placed.sort(key=lambda placed: placed.attempt)
    return logged


def _read_log(file: Path, rid: str, logged: Logged) -> None:
    needle = rid.encode()
    try:
        with file.open("rb") as lines:
            for record in decode(line for number, line in enumerate(lines) if number == 0 or needle in line):
                match record:
                    case Head():
                        head, pool = record, file.name.split(".")[0]
                    case Arrived():
                        logged.arrived, logged.pool = record, pool
                        logged.targets = dict(head.targets)
                    case Placed():
                        logged.placed.append(record)
                        logged.pool = logged.pool or pool
                    case Refused():
                        logged.refused = record
                    case Ended():
                        logged.ended = record
                    case _:
                        pass
    except (OSError, LogError):
        return  # rotated away, or of another version


def _decisions(logged: Logged, waiting: Waiting | None) -> tuple[Decision, ...]:
    found = [
        Decision(
            attempt=placed.attempt,
            path=placed.path.value,
            prefill=placed.prefill,
            decode=placed.decode,
            reason=placed.reason,
            waited_ms=placed.waited_ms,
            hoped_cached_tokens=placed.cached_tokens,
            predicted_ttft_ms=placed.predicted_ttft_ms,
            predicted_step_ms=placed.predicted_step_ms,
        )
        for placed in logged.placed
    ]
    now = waiting.inflight if waiting is not None else None
    if now is not None and all(decision.attempt != now.attempt for decision in found):
        found.append(
            Decision(
                attempt=now.attempt,
                path=now.path.value,
                prefill=now.prefill.worker_id if now.prefill else None,
                decode=now.decode.worker_id,
                reason="",
            )
        )
    return tuple(found)


def _status(row: RequestRow | None, event: UsageEvent | None, waiting: Waiting | None, logged: Logged) -> Status:
    if row is not None:
        return "billed"
    if event is not None:
        return "settled"
    if waiting is not None:
        return "running" if waiting.inflight is not None else "queued"
    return "refused" if logged.refused is not None else "ended"


def _org(row: RequestRow | None, event: UsageEvent | None) -> str:
    return row.organisation if row is not None else event.org if event is not None else ""


def _target(logged: Logged, submit: Submit | None, catalog: Catalog, model: str, tier: str) -> SloTarget | None:
    if logged.arrived is not None and logged.arrived.target is not None:
        return logged.arrived.target
    if submit is not None:
        return submit.owner.slo
    described = catalog.models.get(model)
    return logged.targets.get(tier) or (described.tiers.get(tier) if described is not None else None)


def _blamed(
    logged: Logged, bill: Bill | None, target: SloTarget | None
) -> tuple[str | None, Literal["decision_log", "timings"] | None]:
    if logged.ended is not None:
        return logged.ended.blamed.value, "decision_log"
    seen = bill.timings if bill is not None else None
    if seen is None or target is None:
        return None, None
    if bill is not None and bill.slo_met:
        return Stage.NONE.value, "timings"
    stamps = Stamps(
        target=target,
        ttft_ms=seen.ttft_ms,
        tpot_ms=seen.tpot_ms,
        itl_p99_ms=seen.itl_p99_ms,
        decode_ms=seen.decode_ms,
        decode_tokens=seen.decode_tokens,
        gateway_ms=max(0.0, seen.ttft_ms - seen.queue_ms - seen.prefill_ms - seen.transfer_ms),
        prefill_wait_ms=seen.queue_ms,
        prefill_ms=seen.prefill_ms,
        transfer_ms=seen.transfer_ms,
    )
    return blame(stamps).value, "timings"


# -- where it is written ---------------------------------------------------------------------------


async def _settled(redis: Redis, db: AsyncConnection, rid: str, logged: Logged) -> UsageEvent | None:
    """Return the usage event of a request that billing has not posted. It is kept under its organisation's shard."""
    orgs = [logged.arrived.tenant] if logged.arrived is not None else []
    if not orgs:
        orgs = list((await db.execute(sa.select(organisation.c.id))).scalars())
    for chunk in _chunks(orgs):
        async with redis.pipeline(transaction=False) as pipeline:
            for org in chunk:
                pipeline.get(keys.settled_request(org, rid))
            answers: list[Any] = await pipeline.execute()
        for raw in answers:
            if raw is not None:
                return _usage.decode(raw)
    return None


async def _waiting(redis: Redis, catalog: Catalog, rid: str) -> Waiting | None:
    for pool in catalog.pools:
        raw: Any = await redis.get(keys.inflight(pool, rid))
        submit = await _in_inbox(redis, pool, rid)
        if raw is not None or submit is not None:
            return Waiting(pool=pool, submit=submit, inflight=_inflight.decode(raw) if raw is not None else None)
    return None


async def _in_inbox(redis: Redis, pool: str, rid: str) -> Submit | None:
    """Return the request's entry, which stays in the stream until the request is settled."""
    start = str(max(0, at_ms(rid) - _INBOX_BEFORE_MS))
    needle = rid.encode()
    while True:
        rows: Any = await redis.xrange(keys.inbox(pool), min=start, count=_BATCH)
        for _, fields in rows:
            raw = fields[FIELD.encode()]
            if needle in raw:
                entry = decode_inbox(raw)
                if isinstance(entry, Submit) and entry.rid == rid:
                    return entry
        if len(rows) < _BATCH:
            return None
        start = f"({rows[-1][0].decode()}"


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _BATCH):
        yield names[start : start + _BATCH]


def _bill_of_row(row: RequestRow) -> Bill:
    return Bill(
        outcome=row.outcome,
        meters=row.meters,
        **{name: getattr(row, name) for name in _SAME_IN_ROW},
    )


def _bill_of_event(event: UsageEvent) -> Bill:
    charges = []
    for meter in Meter:
        tokens, price = event.tokens.of(meter), event.price.of(meter, batch=event.batch, scope=event.cache_scope)
        worker = event.decode_worker if meter is Meter.DECODE else event.prefill_worker or event.decode_worker
        cost = rate(tokens, price) if event.billable else 0
        charges.append(MeterRow(meter=meter.value, tokens=tokens, price=price, cost=cost, worker=worker))
    return Bill(
        outcome=event.outcome.value,
        meters=tuple(charges),
        **{name: getattr(event, name) for name in _SAME_IN_ROW},
    )


_SAME_IN_ROW: Final = tuple(name for name in Bill.__struct_fields__ if name not in ("outcome", "meters"))
