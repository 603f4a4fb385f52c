"""What Redis lost comes back without anybody: from what workers say again."""

import msgspec
from billing_rig import attempt_records, now_ms, usage_event
from test_billing_restore import OWNER, mark

from billing.attempts import AttemptSink
from billing.partitions import Partitions
from billing.retold import LONGEST_MS, QUIET_MS, Retold
from contracts import keys
from contracts.settlement import encode_owner
from contracts.wire import FIELD
from workers.records import _line

STREAM = keys.retold("tiny")


def retold(rig, restored):
    async def pools():
        return ["none", "tiny"]

    sink = AttemptSink(rig.engine, Partitions(rig.engine))
    return Retold(rig.engine, rig.redis, sink, pools=pools, restored=restored.append)


async def say(rig, *things, ms_ago):
    entry = b"".join(_line(one) for one in things)
    await rig.redis.xadd(STREAM, {FIELD: entry}, id=f"{now_ms() - ms_ago}-*")


def told(event):
    """What the decode worker says; the prompt was computed by another one, which may be gone."""
    _, decode = attempt_records(event, cached_tokens=0)
    return msgspec.structs.replace(decode, payer=encode_owner(OWNER)), mark(event)


async def test_what_was_lost_is_billed_once_and_the_rest_is_dropped(rig):
    billed, waiting, lost, undelivered = (usage_event() for _ in range(4))
    await rig.bill(billed)
    await rig.emit(waiting)
    prefill, _ = attempt_records(lost)
    await rig.emit_attempts(prefill)
    attempts = rig.attempt_consumer()
    await rig.consume(attempts, 1)  # long ago: only billing still has the prompt's counts
    for event in (billed, waiting, lost):
        await say(rig, *told(event), ms_ago=2 * QUIET_MS)
    await say(rig, told(undelivered)[0], ms_ago=2 * QUIET_MS)
    restored = []
    await retold(rig, restored).look()
    assert restored == [1]
    assert await rig.redis.xlen(STREAM) == 0
    await rig.consume(rig.consumer(), 2)
    row = await rig.one("SELECT * FROM billing.request WHERE request_id = CAST(:rid AS uuid)", rid=lost.rid)
    assert (row.cost, row.outcome, row.cause) == (lost.cost, "finished", "restored")
    assert await rig.scalar("SELECT count(*) FROM billing.request") == 3
    assert await rig.scalar("SELECT count(*) FROM billing.attempt_cost") == 5
    await retold(rig, restored).look()
    assert restored == [1], "nothing is there any more"


async def test_it_waits_until_all_have_said_theirs_but_not_for_ever(rig):
    event, restored = usage_event(), []
    record, delivered = told(event)
    await say(rig, record, ms_ago=QUIET_MS + 5_000)
    await say(rig, delivered, ms_ago=0)
    await retold(rig, restored).look()
    assert restored == []
    await rig.redis.delete(STREAM)
    await say(rig, record, ms_ago=LONGEST_MS + 5_000)
    await say(rig, delivered, ms_ago=0)
    await retold(rig, restored).look()
    assert restored == [1]


async def test_it_is_restored_once_however_often_and_by_whomever_it_is_said(rig):
    event, restored = usage_event(), []
    for _ in range(3):
        await say(rig, *told(event), ms_ago=2 * QUIET_MS)
        await retold(rig, restored).look()
    await rig.consume(rig.consumer(), 1)
    await say(rig, *told(event), ms_ago=QUIET_MS + 1_000)
    await retold(rig, restored).look()
    assert restored == [1, 0, 0, 0]
    assert await rig.scalar("SELECT count(*) FROM billing.request") == 1
