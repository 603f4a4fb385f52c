"""What billing's tests are built from: usage events, streams with them, and consumers."""

import asyncio
import time

from redis.asyncio import Redis
from sqlalchemy import text

from billing.attempts import AttemptSink, attempt_streams
from billing.consumer import UsageSink, usage_streams
from billing.delivery import Delivery
from billing.partitions import Partitions
from billing.streams import GroupReader
from contracts import keys
from contracts.identity import new_rid, shard_of
from contracts.lifecycle import HandOff, Path
from contracts.rating import Price, Tokens, cost
from contracts.slo import Timings
from contracts.units import Nano, NanoPerMillion
from contracts.usage import AttemptRecord, Outcome, UsageEvent
from contracts.wire import FIELD, encode

DEADLINE_S = 30.0

TINY = Price(
    version=1,
    model="tiny",
    prefill_computed=NanoPerMillion(100_000_000),
    prefill_cached=NanoPerMillion(20_000_000),
    decode=NanoPerMillion(400_000_000),
)  # the test catalogue's, nano-units per million tokens


def now_ms():
    return int(time.time() * 1000)


def usage_event(**changes):
    """A finished request of 100 computed, 30 cached and 50 generated tokens, answered with the right cost."""
    fields = {
        "rid": changes.pop("rid", None) or new_rid(changes.pop("at_ms", None) or now_ms() - 1000),
        "org": "org_acme",
        "project": "proj_web",
        "key_id": "key_1",
        "model": "tiny",
        "pool": "tiny",
        "tier": "default",
        "outcome": Outcome.FINISHED,
        "finish_reason": "stop",
        "tokens": Tokens(prefill_computed=100, prefill_cached=30, decode=50),
        "price": TINY,
        "path": Path.PD,
        "hand_off": HandOff.DIRECT,
        "prefill_worker": "prefill-1",
        "decode_worker": "decode-1",
        "timings": Timings(ttft_ms=120.5, decode_ms=490.0, decode_tokens=50, total_ms=700.0),
        "slo_met": True,
    } | changes
    if "cost" not in fields:
        fields["cost"] = cost(fields["tokens"], fields["price"]) if fields["outcome"].billable else Nano(0)
    return UsageEvent(**fields)


def attempt_records(event, **changes):
    """The two records that the pair of workers of a request writes."""
    same = {
        "rid": event.rid,
        "attempt": 1,
        "sample": 0,
        "worker_epoch": 1,
        "pool": event.pool,
        "reason": "stop",
        "prompt_tokens": event.tokens.prompt,
        "cached_tokens": event.tokens.prefill_cached,
        "compute_ms": 12.5,
        "ended_unix_ms": now_ms(),
    } | changes
    return [
        AttemptRecord(phase="prefill", worker_id="prefill-1", completion_tokens=0, **same),
        AttemptRecord(phase="decode", worker_id="decode-1", completion_tokens=event.tokens.decode, **same),
    ]


class Counted:
    """Counts what became of entries, and lets a test wait for it."""

    def __init__(self):
        self.results = {"posted": 0, "repeated": 0, "dead_letter": 0}
        self._changed = asyncio.Event()

    def __call__(self, number, result):
        self.results[result] += number
        self._changed.set()

    async def reach(self, total):
        """Wait until `total` entries are dealt with."""
        async with asyncio.timeout(DEADLINE_S):
            while sum(self.results.values()) < total:
                await self.more()

    async def more(self):
        """Wait until something is counted."""
        self._changed.clear()
        await self._changed.wait()


class Rig:
    """One database and one Redis, and as many consumers as a test wants."""

    def __init__(self, redis: Redis, engine):
        self.redis = redis
        self.engine = engine
        self.partitions = Partitions(engine)

    def reader(self, consumer="c0", streams=None):
        return GroupReader(
            self.redis,
            group=keys.CONSUMER_GROUP_BILLING,
            consumer=consumer,
            streams=streams or usage_streams(),
        )

    def consumer(self, name="c0", count=None, *, sink=None, reader=None, **options):
        sink = sink or UsageSink(self.engine, self.partitions)
        options = {"block_ms": 50, "claim_idle_ms": 60_000} | options
        return Delivery("usage", reader or self.reader(name), sink, count or Counted(), **options)

    def attempt_consumer(self, count=None):
        streams = attempt_streams(["tiny"])
        return Delivery(
            "attempts", self.reader("a0", streams), AttemptSink(self.engine, self.partitions), count or Counted(),
            block_ms=50,
        )  # fmt: skip

    async def emit(self, *events):
        """Write usage events as settle.lua does."""
        for event in events:
            await self.redis.xadd(keys.usage_stream(shard_of(event.org)), {FIELD: encode(event)})

    async def emit_attempts(self, *records):
        for record in records:
            await self.redis.xadd(keys.attempts(record.pool), {FIELD: encode(record)})

    async def consume(self, delivery, total):
        """Run a consumer until it has dealt with `total` entries."""
        count = delivery._count
        task = None
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(delivery.run())
            await count.reach(total)
            task.cancel()

    async def bill(self, *events):
        """Emit events and post them."""
        await self.emit(*events)
        delivery = self.consumer()
        await self.consume(delivery, len(events))
        return delivery._count.results

    async def rows(self, query, **parameters):
        async with self.engine.connect() as conn:
            return (await conn.execute(text(query), parameters)).all()

    async def one(self, query, **parameters):
        (row,) = await self.rows(query, **parameters)
        return row

    async def scalar(self, query, **parameters):
        return (await self.one(query, **parameters))[0]

    async def backlog(self):
        return await self.reader().backlog()
