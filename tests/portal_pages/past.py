"""A week of an organisation's life, written the way billing and the scheduler write it."""

import math
import random
import time

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.attempts import AttemptSink
from billing.database import driver_connection
from billing.events import decode_event, rate_event
from billing.ledger import Ledger
from billing.moments import moment
from billing.partitions import Partitions, ensure_partitions
from billing.posting import post
from billing.prices import PriceBook, PriceVersion
from contracts.identity import new_rid
from contracts.keys import series
from contracts.lifecycle import HandOff, Path
from contracts.rating import Price, Tokens, cost
from contracts.series import Flip, Point, add_command
from contracts.slo import Timings
from contracts.units import Nano, NanoPerMillion
from contracts.usage import AttemptRecord, Outcome, UsageEvent
from contracts.wire import encode

_DAY_MS = 86_400_000
_PRICE = Price(
    version=1,
    model="tiny",
    prefill_computed=NanoPerMillion(100_000_000),
    prefill_cached=NanoPerMillion(20_000_000),
    decode=NanoPerMillion(400_000_000),
)  # the test catalogue's


def past_event(chance: random.Random, at_ms: int, *, org: str, project: str, key_id: str) -> UsageEvent:
    """Return a request that ended at some time, believable and repeatable."""
    prompt = int(chance.lognormvariate(6.6, 0.8))
    cached = int(prompt * chance.choice((0, 0, 0.4, 0.8)))
    decode = max(2, min(1500, int(chance.lognormvariate(4.9, 0.7))))
    unified = prompt < 400
    slow = chance.random() < 0.06
    outcome = chance.choices((Outcome.FINISHED, Outcome.CLIENT_LEFT, Outcome.INTERRUPTED), (95, 3, 2))[0]
    tokens = Tokens(prefill_computed=prompt - cached, prefill_cached=cached, decode=decode)
    queue_ms = chance.expovariate(1 / (900 if slow else 25))
    prefill_ms = 30 + (prompt - cached) * 0.22
    transfer_ms = 0.0 if unified else 6 + prompt * 0.008
    ttft_ms = queue_ms + prefill_ms + transfer_ms + 4
    decode_ms = (decode - 1) * (chance.uniform(19, 34) + (80 if slow else 0))
    return UsageEvent(
        rid=new_rid(at_ms),
        org=org,
        project=project,
        key_id=key_id,
        model="tiny",
        pool="tiny",
        tier="default",
        outcome=outcome,
        cause="worker_lost" if outcome is Outcome.INTERRUPTED else "",
        finish_reason="stop" if outcome is Outcome.FINISHED else "",
        tokens=tokens,
        price=_PRICE,
        cost=cost(tokens, _PRICE) if outcome.billable else Nano(0),
        path=Path.UNIFIED if unified else Path.PD,
        hand_off=None if unified else HandOff.DIRECT,
        stream=True,
        attempts=2 if slow else 1,
        prefill_worker="unified-0" if unified else "prefill-0",
        decode_worker="unified-0" if unified else "decode-0",
        timings=Timings(
            ttft_ms=ttft_ms,
            decode_ms=decode_ms,
            decode_tokens=decode,
            queue_ms=queue_ms,
            prefill_ms=prefill_ms,
            transfer_ms=transfer_ms,
            total_ms=ttft_ms + decode_ms,
        ),
        slo_met=ttft_ms <= 2000 and decode_ms / (decode - 1) <= 100,
        simulated=True,
    )


async def play_week(
    engine: AsyncEngine,
    redis: Redis,
    *,
    org: str,
    owners: list[tuple[str, str]],
    num_requests: int = 600,
    seed: int = 7,
) -> list[UsageEvent]:
    """Write requests of the last week, of pairs of project and key, and the pool's last hour. Returns the events."""
    chance = random.Random(seed)
    now_ms = int(time.time() * 1000)
    events = []
    for i in range(num_requests):
        age_ms = int(7 * _DAY_MS * (i / num_requests) ** 1.1)
        hour = (now_ms - age_ms) / 3_600_000
        if chance.random() < 0.55 + 0.45 * math.cos((hour % 24 - 14) / 24 * 2 * math.pi):
            project, key_id = owners[int(chance.triangular(0, len(owners), 0)) % len(owners)]
            events.append(past_event(chance, now_ms - age_ms - 2000, org=org, project=project, key_id=key_id))
    await write_events(engine, events, days=8)
    # In place of what a scheduler wrote meanwhile, which goes on after it: points are in the order of time.
    pipeline = redis.pipeline(transaction=True)
    pipeline.delete(series("tiny"))
    for point in pool_hour(now_ms):
        pipeline.execute_command(
            *(f"{point.at_unix_ms}-0" if one == "*" else one for one in add_command("tiny", point))
        )
    await pipeline.execute()
    return events


async def write_events(engine: AsyncEngine, events: list[UsageEvent], *, days: int) -> None:
    """Post requests of the last `days` days, with what their workers counted."""
    now_ms = int(time.time() * 1000)
    async with engine.begin() as conn:
        await ensure_partitions(conn, moment(now_ms - days * _DAY_MS).date(), days + 3)
    book = PriceBook(
        [PriceVersion(price=_PRICE, organisation=None, from_ms=0, to_ms=None, source="catalogue", set_by="")], now_ms
    )
    async with driver_connection(engine) as connection:
        await post(connection, Ledger(), [rate_event(decode_event(encode(one)), book) for one in events])
    sink = AttemptSink(engine, Partitions(engine))
    await sink.write(list(await sink.prepare([encode(r) for e in events for r in _attempts(e)])))


def _attempts(event: UsageEvent) -> list[AttemptRecord]:
    assert event.timings is not None
    same = {
        "rid": event.rid,
        "sample": 0,
        "worker_epoch": 1,
        "pool": "tiny",
        "reason": "stop",
        "prompt_tokens": event.tokens.prompt,
        "cached_tokens": event.tokens.prefill_cached,
        "ended_unix_ms": int(time.time() * 1000),
    }
    found = []
    for attempt in range(1, event.attempts + 1):
        seen = event.timings
        found += [
            AttemptRecord(
                attempt=attempt,
                phase="prefill",
                worker_id="prefill-0",
                completion_tokens=0,
                compute_ms=seen.prefill_ms,
                **same,
            ),
            AttemptRecord(
                attempt=attempt,
                phase="decode",
                worker_id="decode-0",
                completion_tokens=event.tokens.decode,
                compute_ms=seen.decode_ms / 12,
                **same,
            ),
        ]
    return found


def pool_hour(now_ms: int) -> list[Point]:
    """Return the course of a pool over an hour in which one worker changed its role."""
    chance = random.Random(3)
    found = []
    for i in range(720):
        moved = i >= 400
        flips = ()
        if i == 400:
            flips = (Flip(worker_id="decode-2", from_role="decode", to_role="prefill", why="ttft_pressure", done=True),)
        found.append(
            Point(
                at_unix_ms=now_ms - (720 - i) * 5000,
                prefill=3 if moved else 2,
                decode=2 if moved else 3,
                unified=1,
                target="3P2D1U" if moved or i > 380 else "2P3D1U",
                why="ttft_pressure" if 380 < i <= 400 else "balanced",
                mode="auto",
                rung="normal",
                met=chance.randint(6, 12),
                missed=0 if moved else chance.choice((0, 0, 1, 2)),
                structural=0,
                refused=0,
                by_stage={} if moved else {"prefill_queue": 1},
                num_waiting=0 if moved else chance.randint(0, 6),
                oldest_wait_s=0.1,
                queued_prefill_tokens=chance.randint(0, 900 if moved else 6000),
                decode_use=0.35 + 0.2 * math.sin(i / 60) + 0.05 * chance.random(),
                num_running=chance.randint(4, 30),
                rate_rps=1.8,
                goodput_rps=2.4,
                flips=flips,
            )
        )
    return found
