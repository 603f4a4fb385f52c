"""Files and batches: validation, results, retries, cancellation, expiry, take-over."""

import asyncio
import datetime as dt
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa
from gateway_rig import PeerWorker, Rig, eventually

from billing.prices import Terms, set_price
from contracts import keys
from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, Phase
from contracts.rating import Meter, Tokens, cost
from contracts.settlement import SettlementScripts, Unreserved, usage_event_of
from contracts.slo import SloTarget
from contracts.usage import REPEATED, Outcome
from contracts.wire import Owner, Submit
from gateway.batch_lines import LineChecker, lines_of
from gateway.batch_tables import batch as batch_table
from gateway.batch_tables import file as file_table
from gateway.batch_tables import file_part
from gateway.batches import Batches

CHAT = "/v1/chat/completions"


def line(custom_id: str, *, url: str = CHAT, method: str = "POST", **body: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Hello {custom_id}"}]
    asked = {"model": "tiny", "messages": messages, **body}
    return {"custom_id": custom_id, "method": method, "url": url, "body": asked}


async def upload(rig: Rig, *lines: object, purpose: str = "batch") -> Any:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    answer = await rig.client.post(
        "/v1/files", files={"file": ("in.jsonl", text.encode(), "application/jsonl")}, data={"purpose": purpose}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def create(rig: Rig, file_id: str, **changes: object) -> Any:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **changes}
    return await rig.client.post("/v1/batches", json=body)


async def batch_in(rig: Rig, batch_id: str, *statuses: str) -> Any:
    async def there() -> Any:
        body = (await rig.client.get(f"/v1/batches/{batch_id}")).json()
        return body if body["status"] in statuses else None

    return await eventually(there)


async def content(rig: Rig, file_id: str) -> list[Any]:
    answer = await rig.client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    return [json.loads(one) for one in answer.text.splitlines()]


async def play(rig: Rig, submit: Submit, text: str, *, worker: PeerWorker | None = None) -> None:
    worker = worker or rig.decode
    await rig.scheduler.placed(submit, decode=worker)
    handle = await worker.open(submit.rid, Phase.UNIFIED)
    await handle.tokens(text)
    await handle.finish(FinishReason.STOP, prompt=len(submit.prompt) // 4, completion=1)


# -- files -------------------------------------------------------------------------------------------------------


async def test_a_file_is_stored_listed_read_and_deleted_and_is_nobody_elses(rig: Rig):
    stored = await upload(rig, line("a"), line("b"))
    assert (stored["object"], stored["purpose"], stored["filename"]) == ("file", "batch", "in.jsonl")
    other = await upload(rig, line("c"))
    listed = (await rig.client.get("/v1/files", params={"limit": 1})).json()
    assert ([one["id"] for one in listed["data"]], listed["has_more"]) == ([other["id"]], True)
    rest = (await rig.client.get("/v1/files", params={"after": other["id"]})).json()
    assert [one["id"] for one in rest["data"]] == [stored["id"]]
    raw = await rig.client.get(f"/v1/files/{stored['id']}/content")
    assert len(raw.content) == stored["bytes"]
    assert [one["custom_id"] for one in await content(rig, stored["id"])] == ["a", "b"]
    mine = rig.client.headers["authorization"]
    await rig.tenant()
    for path in (f"/v1/files/{stored['id']}", f"/v1/files/{stored['id']}/content"):
        assert (await rig.client.get(path)).status_code == 404
    assert (await create(rig, stored["id"])).status_code == 404
    rig.client.headers["authorization"] = mine
    assert (await rig.client.delete(f"/v1/files/{stored['id']}")).json()["deleted"] is True
    assert (await rig.client.get(f"/v1/files/{stored['id']}")).status_code == 404


async def test_what_is_no_batch_file_is_refused(rig: Rig):
    pictures = await rig.client.post("/v1/files", files={"file": ("x.png", b"x")}, data={"purpose": "vision"})
    assert (pictures.status_code, pictures.json()["error"]["param"]) == (400, "purpose")
    nothing = await rig.client.post("/v1/files", data={"purpose": "batch"})
    assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, "file")


async def test_a_file_is_kept_for_thirty_days_or_as_long_as_its_upload_says(rig: Rig):
    stored = await upload(rig, line("a"))
    assert stored["expires_at"] - stored["created_at"] == 30 * 86_400
    short = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    file = {"file": ("in.jsonl", json.dumps(line("a")).encode())}
    told = (await rig.client.post("/v1/files", files=file, data=short)).json()
    assert told["expires_at"] - told["created_at"] == 7200
    for changes in ({"expires_after[seconds]": "60"}, {"expires_after[anchor]": "used_at"}):
        refused = await rig.client.post("/v1/files", files=file, data=short | changes)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(changes)))

    async with rig.gateway.engine.begin() as db:
        over = sa.func.now() - dt.timedelta(seconds=1)
        await db.execute(sa.update(file_table).where(file_table.c.id == told["id"]).values(expires_at=over))
    assert (await rig.client.get(f"/v1/files/{told['id']}")).status_code == 404
    assert [one["id"] for one in (await rig.client.get("/v1/files")).json()["data"]] == [stored["id"]]
    assert await rig.gateway.files.delete_expired_across_tenants() == 1
    async with rig.gateway.engine.connect() as db:
        assert (await db.execute(sa.select(sa.func.count()).select_from(file_part))).scalar_one() == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"endpoint": "/v1/embeddings"}, "endpoint"), ({"completion_window": "1h"}, "completion_window")],
)
async def test_a_batch_of_what_is_not_served_is_refused(rig: Rig, changes: dict[str, str], param: str):
    answer = await create(rig, "file-none", **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_what_postgresql_takes_in_no_text_is_refused_or_unknown_never_a_500(rig: Rig):
    for path in ("/v1/files", "/v1/batches"):
        assert (await rig.client.get(path, params={"after": "a\0b"})).status_code == 400
        assert (await rig.client.get(f"{path}/a%00b")).status_code == 404
    assert (await rig.client.delete("/v1/files/a%00b")).status_code == 404
    assert (await rig.client.post("/v1/batches/a%00b/cancel")).status_code == 404
    stored = await upload(rig, line("a\0b"))
    refused = await create(rig, stored["id"], metadata={"a": "\0"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
    failed = await batch_in(rig, (await create(rig, stored["id"])).json()["id"], "failed")
    assert failed["errors"]["data"][0]["code"] == "invalid_custom_id"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations", "/v1/audio/speech", "/v1/moderations"])
async def test_what_is_not_served_is_a_404_that_says_so(rig: Rig, path: str):
    answer = await rig.client.post(path, json={"model": "tiny", "input": "x"})
    assert answer.status_code == 404
    assert "not served here" in answer.json()["error"]["message"]


# -- batches -----------------------------------------------------------------------------------------------------


async def test_a_batch_runs_its_lines_in_the_batch_tier_and_writes_both_files(rig: Rig):
    stored = await upload(rig, line("good"), line("bad", temperature=9), line("fine", max_tokens=3))
    created = (await create(rig, stored["id"], metadata={"run": "1"})).json()
    assert (created["object"], created["status"]) == ("batch", "validating")
    submits = sorted([await rig.scheduler.submit(), await rig.scheduler.submit()], key=lambda s: len(s.prompt))
    for submit in submits:
        assert submit.batch
        assert submit.owner.tier == "batch"
        await play(rig, submit, "Hi")
    done = await batch_in(rig, created["id"], "completed")
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert done["metadata"] == {"run": "1"}
    assert done["completed_at"] >= done["in_progress_at"] >= done["created_at"]
    output = await content(rig, done["output_file_id"])
    assert [one["custom_id"] for one in output] == ["good", "fine"]
    for one in output:
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        assert one["response"]["body"]["object"] == "chat.completion"
        assert one["response"]["request_id"] in {submit.rid for submit in submits}
    (error,) = await content(rig, done["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    event = await rig.usage(submits[0].rid)
    assert event.batch
    assert event.tier == "batch"
    assert await rig.nothing_queued_or_reserved()


async def test_a_batch_request_pays_the_batch_price(rig: Rig, catalog):
    async with rig.gateway.engine.begin() as db:
        price = rig.gateway.prices.list_prices["tiny"]
        meters = {meter: price.of(meter) for meter in Meter}
        await set_price(db, model="tiny", meters=meters, terms=Terms(batch_ppm=500_000))
    rig.gateway.prices._own.clear()
    stored = await upload(rig, line("a"))
    created = (await create(rig, stored["id"])).json()
    submit = await rig.scheduler.submit()
    await play(rig, submit, "x")
    await batch_in(rig, created["id"], "completed")
    event = await rig.usage(submit.rid)
    # 0.10 and 0.40 EUR per million are 100 and 400 nano-units a token; the batch price is half of that.
    assert event.cost == event.tokens.prompt * 50 + 200
    assert event.cost == cost(event.tokens, event.price, batch=True)
    assert event.tokens == Tokens(prefill_computed=event.tokens.prompt, decode=1)


async def test_a_file_with_bad_lines_runs_none_and_says_which(rig: Rig):
    elsewhere, wrong_method = line("b", url="/v1/completions"), line("c", method="GET")
    stored = await upload(rig, line("a"), line("a"), "{", elsewhere, wrong_method, line("d", stream=True))
    created = (await create(rig, stored["id"])).json()
    failed = await batch_in(rig, created["id"], "failed")
    assert [(one["line"], one["code"]) for one in failed["errors"]["data"]] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (4, "mismatched_url"),
        (5, "invalid_method"),
        (6, "invalid_body"),
    ]
    assert failed["failed_at"] is not None
    assert failed["output_file_id"] is None
    assert await rig.nothing_queued_or_reserved()
    empty = await upload(rig, "")
    nothing = await batch_in(rig, (await create(rig, empty["id"])).json()["id"], "failed")
    assert nothing["errors"]["data"][0]["code"] == "empty_file"


async def test_a_line_that_finds_no_room_tries_again(rig: Rig):
    stored = await upload(rig, line("a"))
    created = (await create(rig, stored["id"])).json()
    refused = await rig.scheduler.submit()
    await rig.scheduler.refused(refused, "no_capacity", "full", 0.01)
    again = await rig.scheduler.submit()
    assert again.rid != refused.rid
    await play(rig, again, "x")
    done = await batch_in(rig, created["id"], "completed")
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_cancelled_batch_stops_its_lines_and_keeps_what_was_answered(rig: Rig):
    stored = await upload(rig, line("a"), line("b"))
    created = (await create(rig, stored["id"])).json()
    first, second = await rig.scheduler.submit(), await rig.scheduler.submit()
    await play(rig, first, "x")
    await rig.scheduler.placed(second, decode=rig.decode)
    handle = await rig.decode.open(second.rid, Phase.UNIFIED)
    await handle.tokens("y")

    async def one_done() -> bool:
        return (await rig.client.get(f"/v1/batches/{created['id']}")).json()["request_counts"]["completed"] == 1

    await eventually(one_done)
    cancelling = (await rig.client.post(f"/v1/batches/{created['id']}/cancel")).json()
    assert cancelling["status"] == "cancelling"
    await eventually(lambda: [a for a in rig.decode.aborts if a.reason == "client_left"])
    await handle.finish(FinishReason.ABORTED, prompt=3, completion=1)
    done = await batch_in(rig, created["id"], "cancelled")
    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (answered,) = await content(rig, done["output_file_id"])
    (stopped,) = await content(rig, done["error_file_id"])
    assert {answered["custom_id"], stopped["custom_id"]} == {"a", "b"}
    assert (stopped["response"], stopped["error"]["code"]) == (None, "batch_cancelled")
    again = (await rig.client.post(f"/v1/batches/{created['id']}/cancel")).json()
    assert again["status"] == "cancelled"


async def test_a_batch_whose_window_is_over_ends_as_expired(rig: Rig):
    stored = await upload(rig, line("a"))
    created = (await create(rig, stored["id"])).json()
    submit = await rig.scheduler.submit()
    async with rig.gateway.engine.begin() as db:
        await db.execute(sa.update(batch_table).values(expires_at=sa.func.now() - dt.timedelta(seconds=1)))
    done = await batch_in(rig, created["id"], "expired")
    assert done["expired_at"] is not None
    (unanswered,) = await content(rig, done["error_file_id"])
    assert unanswered["error"]["code"] == "batch_expired"
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cause, event.cost) == (Outcome.INTERRUPTED, "batch_expired", 0)


async def dead_gateways_batch(rig: Rig, *ids: str) -> tuple[Any, str]:
    """A batch that a gateway claimed which lives no more; it began the first line: the batch and that line's rid."""
    rig.gateway.batch_runner._num_batches = 16  # it is busy
    dead = Batches(rig.gateway.engine, runner="dead")
    stored = await upload(rig, *(line(one) for one in ids))
    created = (await create(rig, stored["id"])).json()
    assert await dead.claim_across_tenants(dt.timedelta(seconds=60)) is not None

    async def lines() -> AsyncIterator[Any]:
        checker = LineChecker(CHAT, max_line_bytes=10_000)
        for number, one in enumerate(ids, 1):
            yield checker.check(number, json.dumps(line(one)).encode())

    await dead.accept(rig.org.id, created["id"], lines())
    row = await dead.take_line(rig.org.id, created["id"], new_rid(time.time_ns() // 1_000_000))
    assert row is not None
    assert row.custom_id == ids[0]
    return created, row.rid


async def taken_over(rig: Rig) -> None:
    async with rig.gateway.engine.begin() as db:
        await db.execute(sa.update(batch_table).values(runner_until=sa.func.now() - dt.timedelta(seconds=1)))
    rig.gateway.batch_runner._num_batches = 0
    rig.gateway.batch_runner.wake()  # sooner than by itself


async def settled_elsewhere(rig: Rig, rid: str, outcome: Outcome) -> None:
    """The scheduler, or the gateway before its death, settled the request."""
    price = rig.gateway.prices.list_prices["tiny"]
    owner = Owner(
        org=rig.org.id,
        project=rig.project.id,
        key_id=rig.key.id,
        model="tiny",
        tier="batch",
        price=price,
        slo=SloTarget(),
    )
    event = usage_event_of(owner, rid=rid, pool="tiny", outcome=outcome, tokens=Tokens(prefill_computed=9, decode=1))
    assert await SettlementScripts(rig.gateway.requests).settle(event, {}, unreserved=Unreserved(rates=(), budgets=()))


async def test_a_batch_of_a_dead_gateway_goes_on_where_it_was(rig: Rig):
    """The batch is claimed by a gateway that never lives; its lines, one of them running there, run here."""
    created, rid = await dead_gateways_batch(rig, "a", "b")
    await settled_elsewhere(rig, rid, Outcome.INTERRUPTED)
    async with asyncio.TaskGroup() as tasks:
        await taken_over(rig)
        submits = [await rig.scheduler.submit(), await rig.scheduler.submit()]
        for submit in submits:
            tasks.create_task(play(rig, submit, "x"))
    done = await batch_in(rig, created["id"], "completed")
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert [one["custom_id"] for one in await content(rig, done["output_file_id"])] == ["a", "b"]
    assert rid not in {submit.rid for submit in submits}
    assert all([(await rig.usage(submit.rid)).billable for submit in submits])


async def test_a_line_that_was_paid_before_its_gateway_died_is_answered_again_for_nothing(rig: Rig):
    created, rid = await dead_gateways_batch(rig, "a")
    await settled_elsewhere(rig, rid, Outcome.FINISHED)
    await taken_over(rig)
    refused = await rig.scheduler.submit()
    await rig.scheduler.refused(refused, "no_capacity", "full", 0.01)
    submit = await rig.scheduler.submit()
    assert rid not in (refused.rid, submit.rid)
    assert refused.owner.repeated
    assert submit.owner.repeated  # also to the scheduler, which settles if this gateway dies too
    await play(rig, submit, "x")
    done = await batch_in(rig, created["id"], "completed")
    (answered,) = await content(rig, done["output_file_id"])
    assert answered["response"]["request_id"] == submit.rid
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cause, event.cost, event.billable) == (Outcome.FINISHED, REPEATED, 0, False)
    assert event.tokens.decode == 1  # counted as our cost


async def test_whether_a_request_was_paid_is_unknown_until_it_is_settled(rig: Rig):
    was_paid = rig.gateway.lookup.was_paid
    never, open_, paid, broken = (new_rid(time.time_ns() // 1_000_000) for _ in range(4))
    await rig.redis.set(keys.reservation(rig.org.id, open_), b"r")
    await settled_elsewhere(rig, paid, Outcome.FINISHED)
    await settled_elsewhere(rig, broken, Outcome.INTERRUPTED)
    found = [await was_paid(rig.org.id, rid) for rid in (never, open_, paid, broken)]
    assert found == [False, None, True, False]


async def test_a_revoked_key_ends_its_batch(rig: Rig):
    stored = await upload(rig, line("a"))
    rig.gateway.batch_runner._num_batches = 16
    created = (await create(rig, stored["id"])).json()
    watcher = await rig.tenants.create_key(rig.org.id, rig.project.id, "watch")
    await rig.tenants.revoke(rig.org.id, rig.key.id)
    rig.client.headers["authorization"] = f"Bearer {watcher[1]}"
    rig.gateway.batch_runner._num_batches = 0
    rig.gateway.batch_runner.wake()
    failed = await batch_in(rig, created["id"], "failed")
    assert failed["errors"]["data"][0]["code"] == "invalid_api_key"


async def test_batches_are_listed_newest_first(rig: Rig):
    empty = await upload(rig, "")
    ids = [(await create(rig, empty["id"])).json()["id"] for _ in range(3)]
    first = (await rig.client.get("/v1/batches", params={"limit": 2})).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    rest = (await rig.client.get("/v1/batches", params={"after": first["last_id"]})).json()
    assert [one["id"] for one in rest["data"]] == ids[:1]
    await rig.tenant()
    assert (await rig.client.get("/v1/batches")).json()["data"] == []
    assert (await rig.client.get(f"/v1/batches/{ids[0]}")).status_code == 404


# -- without a gateway -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_lines_are_the_same_however_the_bytes_are_cut(size: int):
    text = b'{"a":1}\n\n  {"b":"\xe2\x98\x83"}\r\n' + b"x" * 30 + b"\n{}"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(text), size):
            yield text[start : start + size]

    got = [(number, raw) async for number, raw in lines_of(pieces(), max_line_bytes=20)]
    assert [(n, raw) for n, raw in got if n != 4] == [(1, b'{"a":1}'), (3, b'{"b":"\xe2\x98\x83"}'), (5, b"{}")]
    (long,) = [raw for n, raw in got if n == 4]
    assert len(long) > 20
