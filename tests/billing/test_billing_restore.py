"""What Redis lost comes back from the workers' journals, once, and only what a tenant owes."""

import msgspec
from billing_rig import TINY, attempt_records, now_ms, usage_event

from billing.attempts import AttemptSink
from billing.partitions import Partitions
from billing.restore import read_journals, restore
from contracts import keys
from contracts.rating import Tokens
from contracts.settlement import Budget, Reservation, Reserved, SettlementScripts, encode_owner
from contracts.slo import SloTarget
from contracts.usage import DeliveredMark
from contracts.wire import Owner
from workers.records import Journal, _line

OWNER = Owner(
    org="org_acme", project="proj_web", key_id="key_1", model="tiny", tier="default", price=TINY, slo=SloTarget()
)


def written(folder, worker, *things):
    Journal(folder, worker).write(b"".join(_line(one) for one in things))


def records(event, *, payer=True, owner=OWNER, **changes):
    prefill, decode = attempt_records(event, **changes)
    return prefill, msgspec.structs.replace(decode, payer=encode_owner(owner) if payer else "")


def mark(event, attempt=1, sample=0):
    return DeliveredMark(delivered=event.rid, attempt=attempt, sample=sample)


async def run(rig, folder):
    sink = AttemptSink(rig.engine, Partitions(rig.engine))
    return await restore(rig.engine, rig.redis, sink, read_journals(folder))


async def test_lost_usage_is_billed_once_at_the_price_that_was_told(rig, tmp_path):
    billed, waiting, lost = usage_event(), usage_event(), usage_event()
    await rig.bill(billed)
    await rig.redis.flushall()
    await rig.emit(waiting)
    for number, event in enumerate((billed, waiting, lost)):
        prefill, decode = records(event)
        written(tmp_path / "p", "prefill-1", prefill)
        written(tmp_path / f"d{number}", "decode-1", decode, mark(event))
    first = await run(rig, tmp_path)
    assert (first.records, first.cost_rows, first.requests, first.cost_nano) == (6, 6, (lost.rid,), lost.cost)
    again = await run(rig, tmp_path)
    assert (again.cost_rows, again.requests) == (0, ()), "it waits in the stream"
    await rig.consume(rig.consumer(), 2)
    assert (await run(rig, tmp_path)).requests == ()
    row = await rig.one("SELECT * FROM billing.request WHERE request_id = CAST(:rid AS uuid)", rid=lost.rid)
    assert (row.cost, row.outcome, row.cause, row.settled_by) == (lost.cost, "finished", "restored", "billing")
    tokens = await rig.rows(
        "SELECT tokens FROM billing.usage_record WHERE request_id = CAST(:rid AS uuid) ORDER BY meter", rid=lost.rid
    )
    assert [one.tokens for one in tokens] == [100, 30, 50]
    assert await rig.scalar("SELECT count(*) FROM billing.request") == 3


async def test_a_line_of_a_batch_is_restored_at_the_price_of_batches(rig, tmp_path):
    event = usage_event(tokens=Tokens(prefill_computed=1_000_000, prefill_cached=0, decode=1_000_000))
    price = msgspec.structs.replace(TINY, batch_ppm=500_000)
    line = msgspec.structs.replace(OWNER, batch=True, tier="batch", price=price)
    written(tmp_path, "w", *records(event, owner=line), mark(event))
    assert (await run(rig, tmp_path)).cost_nano == event.cost // 2
    await rig.consume(rig.consumer(), 1)
    assert await rig.scalar("SELECT batch FROM billing.request")


async def test_what_did_not_reach_its_gateway_or_is_still_reserved_is_left_alone(rig, tmp_path):
    unheard, running, interrupted, unknown = (usage_event() for _ in range(4))
    written(tmp_path, "w", *records(unheard))
    written(tmp_path, "w", *records(running), mark(running))
    await rig.redis.set(keys.reservation(running.org, running.rid), b"x")
    written(tmp_path, "w", *records(interrupted, reason="aborted"), mark(interrupted))
    written(tmp_path, "w", *records(unknown, payer=False), mark(unknown))
    with (tmp_path / "attempts-w.jsonl").open("ab") as file:
        file.write(b'{"v":1,"rid":"torn')
    done = await run(rig, tmp_path)
    assert (done.requests, done.cost_rows, done.unreadable) == ((), 8, 1)


async def test_a_reservation_that_came_back_with_an_old_replica_is_settled_by_the_workers_counts(rig, tmp_path):
    """Two requests were settled on the old master alone: one ended long ago, the other may still be settled."""
    old, fresh = usage_event(), usage_event()
    scripts = SettlementScripts(rig.redis)
    budget = keys.budget("org_acme", "org", "org_acme")
    await rig.redis.hset(keys.key_states("org_acme"), "key_1", "active:1")
    for event in (old, fresh):
        reservation = Reservation(
            rid=event.rid, member=f"org_acme/{event.rid}", pool="tiny", owner=encode_owner(OWNER), key_id="key_1",
            key_state="active:1", now_ms=now_ms(), deadline_ms=now_ms() + 600_000,
            budgets=(Budget(key=budget, limit=10**9, amount=1_000_000),),
        )  # fmt: skip
        assert isinstance(await scripts.reserve("org_acme", reservation), Reserved)
    written(tmp_path, "w", *records(old, ended_unix_ms=now_ms() - 120_000), mark(old))
    written(tmp_path, "w", *records(fresh), mark(fresh))
    assert (await run(rig, tmp_path)).requests == (old.rid,)
    assert not await scripts.settle(old, {}), "it is settled; whoever comes later changes nothing"
    assert await scripts.settle(fresh, {})
    await rig.consume(rig.consumer(), 2)
    assert await rig.scalar("SELECT sum(cost) FROM billing.request") == old.cost + fresh.cost
    assert int(await rig.redis.hget(budget, "reserved")) == 0


async def test_an_attempt_that_began_after_the_answer_was_delivered_changes_nothing(rig, tmp_path):
    """A scheduler that reads a replica of before the end runs the request again, until the gateway waves it off."""
    event = usage_event()
    written(tmp_path, "w", *records(event), mark(event))
    written(tmp_path, "u", *records(event, attempt=2, reason="aborted"))
    done = await run(rig, tmp_path)
    assert (done.requests, done.cost_nano) == ((event.rid,), event.cost)


async def test_a_continued_answer_counts_every_token_once(rig, tmp_path):
    event = usage_event(tokens=Tokens(prefill_computed=100, prefill_cached=30, decode=50))
    prefill, _ = records(event)
    _, rest = records(event, attempt=2, prompt_tokens=130 + 20)
    rest = msgspec.structs.replace(rest, completion_tokens=30, phase="unified")
    written(tmp_path, "w", prefill, rest, mark(event, attempt=2))
    done = await run(rig, tmp_path)
    assert (done.requests, done.cost_nano) == ((event.rid,), event.cost)


async def test_journals_below_a_folder_are_all_read_rotated_ones_too(tmp_path):
    event = usage_event(at_ms=now_ms())
    journal = Journal(tmp_path / "w1", "w1")
    journal.write(b"".join(_line(one) for one in records(event)))
    journal._rotate()
    journal.write(_line(mark(event)))
    found = read_journals(tmp_path)
    assert (len(found.records), found.delivered) == (2, {(event.rid, 1, 0)})
