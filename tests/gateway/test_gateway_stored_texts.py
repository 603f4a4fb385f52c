"""Prompts and answers: stored for organisations that ask for it, by every endpoint, however it ends, nowhere else."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from gateway_rig import HELLO, Rig, eventually
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, Phase
from contracts.parsing import Detail, ToolCallDelta, detail_to_pb
from contracts.usage import Outcome
from contracts.wire import Submit, pack_ids
from gateway.admin.text_routes import TextDesk
from gateway.outputs import Nowhere
from gateway.text_book import SWEEP_ROWS, Talk, Text, TextBook

ASKED = "zebra-marzipan"  # in every prompt
SAID = ("quick", "silver-", "teapot")  # every answer
ANSWERED = "".join(SAID)
MESSAGES = [{"role": "user", "content": f"Tell me of the {ASKED}"}]
ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES}),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"model": "tiny", "prompt": f"Of the {ASKED}"}),
    ("/v1/completions", {"model": "tiny", "prompt": f"Of the {ASKED}", "stream": True}),
    ("/v1/responses", {"model": "tiny", "input": f"Of the {ASKED}", "store": False}),
    ("/v1/responses", {"model": "tiny", "input": f"Of the {ASKED}", "store": False, "stream": True}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 50, "messages": MESSAGES}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 50, "messages": MESSAGES, "stream": True}),
)


def desk(rig: Rig) -> TextDesk:
    found: TextDesk = rig.gateway.admin.texts
    return found


async def consent(rig: Rig, *, days: int = 30) -> None:
    """Have texts stored, and wait until this gateway knows."""
    await desk(rig).give(rig.org.id, days=days, actor="test")
    await knows(rig, keeps=True)


async def knows(rig: Rig, *, keeps: bool) -> None:
    async def seen() -> bool:
        key = await rig.gateway.auth.authenticate(f"Bearer {rig.secret}")
        return key.keeps_texts is keeps

    await eventually(seen)


async def play(rig: Rig, *pieces: str) -> Submit:
    """Play the worker of the next request."""
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode)
    handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
    for piece in pieces:
        await handle.tokens(piece)
    await handle.finish(FinishReason.STOP, prompt=len(submit.prompt) // 4, completion=len(pieces))
    return submit


async def ask(rig: Rig, path: str, body: dict[str, Any]) -> str:
    """Ask, have it answered with SAID, and return the request's id."""
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(rig.client.post(path, json=body))
        submit = await play(rig, *SAID)
    answer = asking.result()
    assert answer.status_code == 200, answer.text
    assert submit.rid in answer.text
    await rig.usage(submit.rid)
    return submit.rid


async def stored(rig: Rig, rid: str) -> Talk:
    """Return what is stored of a request, as soon as it is."""
    found: Talk = await eventually(lambda: desk(rig).book.find(rig.org.id, rid))
    return found


async def written(rig: Rig) -> None:
    """Wait until everything that ended is written or refused."""
    await eventually(rig.gateway.texts._idle.is_set)


@asynccontextmanager
async def streaming(rig: Rig) -> AsyncIterator[tuple[Submit, Any, Any]]:
    """A stream that has begun with SAID: the request, its worker's side and the client's lines."""
    request = rig.client.build_request(
        "POST", "/v1/chat/completions", json={**HELLO, "messages": MESSAGES, "stream": True}
    )
    async with asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(rig.client.send(request, stream=True))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await handle.tokens(*SAID)
    response = opening.result()
    lines = response.aiter_lines()
    try:
        async for line in lines:
            if SAID[-1] in line:
                break
        yield submit, handle, lines
    finally:
        await response.aclose()


async def rows_with(engine: AsyncEngine, *words: str) -> set[str]:
    """Return the tables of the whole database with a row that holds one of the words, as text or as bytes."""
    found = set()
    tables = sa.text(
        "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname IN ('tenancy', 'billing') AND c.relkind = 'r'"
    )
    async with engine.connect() as db:
        for table in (await db.execute(tables)).scalars().all():
            for word in words:
                holds = "strpos(t::text, :word) > 0 OR strpos(t::text, :hex) > 0"
                either = sa.text(f"SELECT EXISTS (SELECT FROM {table} t WHERE {holds})")
                if (await db.execute(either, {"word": word, "hex": word.encode().hex()})).scalar_one():
                    found.add(table)
    return found


async def keys_with(redis: Redis, *words: str) -> set[str]:
    """Return the keys of Redis whose value holds one of the words."""
    found = set()
    async for key in redis.scan_iter():
        kind = (await redis.type(key)).decode()
        reads: dict[str, Any] = {
            "string": redis.get,
            "hash": redis.hgetall,
            "stream": redis.xrange,
            "zset": lambda key: redis.zrange(key, 0, -1),
            "set": redis.smembers,
            "list": lambda key: redis.lrange(key, 0, -1),
        }
        value = repr(await reads[kind](key)) if kind in reads else ""  # none: it has expired meanwhile
        if any(word in value for word in words):
            found.add(key.decode())
    return found


async def test_who_did_not_ask_for_it_has_nothing_stored_anywhere(rig: Rig) -> None:
    with structlog.testing.capture_logs() as logs:
        for path, body in ASKS:
            await ask(rig, path, body)
        async with streaming(rig) as (submit, handle, _):
            pass
        await handle.finish(FinishReason.ABORTED, prompt=9, completion=3)
        await rig.usage(submit.rid)
        await written(rig)
    words = (ASKED, *SAID)
    assert await rows_with(rig.gateway.engine, *words) == set()
    assert await keys_with(rig.redis, *words) == set()
    assert not [line for line in logs if any(word in repr(line) for word in words)]
    async with rig.gateway.engine.connect() as db:
        assert (await db.execute(sa.text("SELECT count(*) FROM tenancy.stored_text"))).scalar_one() == 0


async def test_every_endpoints_prompt_and_answer_are_in_one_table_and_in_no_log_or_metric(rig: Rig) -> None:
    await consent(rig)
    with structlog.testing.capture_logs() as logs:
        for path, body in ASKS:
            rid = await ask(rig, path, body)
            talk = await stored(rig, rid)
            assert json.loads(talk.prompt) == body
            (choice,) = talk.answers
            assert (choice.message.content, choice.finish_reason) == (ANSWERED, "stop"), path
            assert (talk.prompt_cut, talk.answer_cut, talk.broken) == (False, False, "")
    words = (ASKED, ANSWERED)
    assert await rows_with(rig.gateway.engine, *words) == {"tenancy.stored_text"}
    assert await keys_with(rig.redis, *words, *SAID) == set()
    assert not [line for line in logs if any(word in repr(line) for word in words)]
    counted = [
        (sample.labels, sample.value)
        for metric in rig.gateway._instruments.registry.collect()
        for sample in metric.samples
        if sample.name == "pdgate_stored_texts_total"
    ]
    assert counted == [({"result": "written"}, len(ASKS))]


async def test_prompts_of_one_body_share_it_and_have_answers_of_their_own(rig: Rig) -> None:
    await consent(rig)
    body = {"model": "tiny", "prompt": [f"a {ASKED}", "b"], "n": 1}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.client.post("/v1/completions", json=body))
        first, second = await play(rig, "one"), await play(rig, "two")
    talks = [await stored(rig, submit.rid) for submit in (first, second)]
    assert [json.loads(talk.prompt) for talk in talks] == [body, body]
    assert [talk.answers[0].message.content for talk in talks] == ["one", "two"]
    await desk(rig).delete(rig.org.id, first.rid, actor="test")
    assert await rows_with(rig.gateway.engine, ASKED) == set()  # nor is the second one's half left


async def test_reasoning_and_tool_calls_are_part_of_the_answer(rig: Rig) -> None:
    await consent(rig)
    details = (
        Detail(reasoning="Hm."),
        Detail(tool_calls=(ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"city":'),)),
        Detail(tool_calls=(ToolCallDelta(index=0, arguments='"Ulm"}'),)),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        for detail in details:
            await rig.decode.send(
                handle=[handle.handle], text=[""], num_tokens=[1], token_ids=pack_ids([1]),
                details=[detail_to_pb(0, detail)],
            )  # fmt: skip
        await handle.finish(FinishReason.STOP, prompt=9, completion=3)
    (choice,) = (await stored(rig, submit.rid)).answers
    assert choice.message.reasoning_content == "Hm."
    (call,) = choice.message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "weather", '{"city":"Ulm"}')
    assert choice.finish_reason == "tool_calls"


async def test_an_answer_whose_client_left_is_stored_as_far_as_it_came(rig: Rig) -> None:
    await consent(rig)
    async with streaming(rig) as (submit, handle, _):
        pass
    await handle.finish(FinishReason.ABORTED, prompt=9, completion=3)
    assert (await rig.usage(submit.rid)).outcome is Outcome.CLIENT_LEFT
    talk = await stored(rig, submit.rid)
    assert (talk.answers[0].message.content, talk.broken) == (ANSWERED, "client_left")


async def test_an_answer_that_broke_off_is_stored_with_the_reason(rig: Rig) -> None:
    await consent(rig)
    async with streaming(rig) as (submit, _, lines):
        rig.gateway.table.find(submit.rid).break_off("worker_lost")
        assert [line async for line in lines]
    talk = await stored(rig, submit.rid)
    assert (talk.answers[0].message.content, talk.broken) == (ANSWERED, "interrupted")


async def test_a_prompt_and_an_answer_are_stored_up_to_a_bound(rig: Rig) -> None:
    await consent(rig)
    rig.gateway.texts._max_text_bytes = 100
    async with asyncio.TaskGroup() as tasks:
        body = {**HELLO, "messages": [{"role": "user", "content": "ä" * 200}]}
        tasks.create_task(rig.client.post("/v1/chat/completions", json=body))
        submit = await play(rig, "y" * 60, "z" * 60, "w")
    talk = await stored(rig, submit.rid)
    assert (talk.prompt_cut, talk.answer_cut) == (True, True)
    assert len(talk.prompt.encode()) <= 103  # half a character at the end is shown as one
    assert talk.answers[0].message.content == "y" * 60
    assert talk.answers[0].finish_reason == "stop"


async def test_a_withdrawal_hides_everything_at_once_deletes_it_and_a_new_consent_brings_nothing_back(rig: Rig) -> None:
    await consent(rig)
    rid = await ask(rig, *ASKS[0])
    await stored(rig, rid)
    async with streaming(rig) as (running, handle, lines):
        await desk(rig).withdraw(rig.org.id, actor="test")
        assert await desk(rig).book.find(rig.org.id, rid) is None
        await knows(rig, keeps=False)
        await handle.finish(FinishReason.STOP, prompt=9, completion=3)
        assert [line async for line in lines]  # the answer that ran is whole, and written nowhere
    await rig.usage(running.rid)
    await written(rig)
    await consent(rig)
    for old in (rid, running.rid):
        assert await desk(rig).book.find(rig.org.id, old) is None
    await eventually(lambda: nothing_in(rig.gateway.engine))
    async with rig.gateway.engine.connect() as db:
        query = sa.text("SELECT action, actor FROM tenancy.change WHERE action LIKE 'texts%' ORDER BY id")
        acts = [tuple(row) for row in await db.execute(query)]
    assert acts == [("texts_stored", "test"), ("texts_withdrawn", "test"), ("texts_stored", "test")]


async def nothing_in(engine: AsyncEngine) -> bool:
    async with engine.connect() as db:
        return not (await db.execute(sa.text("SELECT count(*) FROM tenancy.stored_text"))).scalar_one()


def text_of(org: str, age_days: float = 0.0) -> Text:
    rid = new_rid(int((time.time() - age_days * 86_400) * 1000))
    return Text(
        org=org, rid=rid, asked_with=rid, prompt=b"{}", prompt_cut=False, answer=b"[]", answer_cut=False, broken=""
    )


async def test_what_is_too_old_is_not_shown_and_deleted_and_nobody_elses_is(rig: Rig) -> None:
    book, other = TextBook(rig.gateway.engine), await rig.tenants.create_organisation("Others")
    for org, days in ((rig.org.id, 10), (other.id, 30)):
        await book.give(org, days=days, actor="test")
    async with rig.gateway.engine.begin() as db:  # as if they had consented long ago
        await db.execute(sa.text("UPDATE tenancy.organisation SET texts_since = now() - interval '300 days'"))
    old, young, theirs = text_of(rig.org.id, 11), text_of(rig.org.id, 9), text_of(other.id, 11)
    assert await book.add([old, young, theirs]) == 3
    assert await book.add([young]) == 1  # said again after a lost answer: one row
    assert await book.find(rig.org.id, old.rid) is None
    assert await book.find(rig.org.id, theirs.rid) is None
    assert (await book.consent(rig.org.id)).num_requests == 1
    assert await book.sweep_across_tenants() == 1
    assert await book.sweep_across_tenants() == 0
    assert await book.find(rig.org.id, young.rid) is not None
    assert await book.find(other.id, theirs.rid) is not None


async def test_a_large_withdrawal_is_deleted_part_by_part(rig: Rig) -> None:
    book = TextBook(rig.gateway.engine)
    await book.give(rig.org.id, days=30, actor="test")
    texts = [text_of(rig.org.id) for _ in range(SWEEP_ROWS + 20)]
    assert await book.add(texts) == len(texts)
    await book.withdraw(rig.org.id, actor="test")
    assert [await book.sweep_across_tenants() for _ in range(3)] == [SWEEP_ROWS, 20, 0]


async def test_no_answer_waits_for_the_database_and_memory_is_bounded(rig: Rig) -> None:
    await consent(rig)
    async with rig.gateway.engine.begin() as db:
        await db.execute(sa.text("LOCK TABLE tenancy.stored_text IN ACCESS EXCLUSIVE MODE"))
        kept = await ask(rig, *ASKS[0])  # answered and settled while nothing can be written
        rig.gateway.texts._max_waiting_bytes = 1
        dropped = await ask(rig, *ASKS[1])
        assert not rig.gateway.texts._idle.is_set()
    assert json.loads((await stored(rig, kept)).prompt) == ASKS[0][1]
    await written(rig)
    assert await desk(rig).book.find(rig.org.id, dropped) is None


async def test_outputs_of_others_are_not_wrapped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the consent a request's output is the endpoint's own: nothing is between a token and its stream."""
    wrapped: list[Any] = []
    monkeypatch.setattr(rig.gateway.texts, "recorded", lambda *given: wrapped.append(given) or [Nowhere()])
    async with streaming(rig) as (submit, handle, _):
        assert type(rig.gateway.table.find(submit.rid).output).__name__ == "EventStream"
        await handle.finish(FinishReason.STOP, prompt=9, completion=3)
    assert wrapped == []
