"""A request that comes again while the first is still answered joins its answer: the same bytes, charged once."""

import asyncio
import json

import httpx
import pytest
from gateway_rig import HELLO, Rig, SilentTelemetry, events_of, eventually
from test_gateway_idempotency import STREAM, post, spent

from contracts import keys
from contracts.lifecycle import FinishReason, Phase
from gateway import live_answers
from gateway.app import Gateway, create_app
from gateway.http_server import http_server
from gateway.settings import Settings
from tests.processes import free_port


@pytest.fixture
async def replica(rig: Rig, redis_url, database_url, catalog_file, catalog, models_dir, tmp_path):
    """A client of a second gateway, beside the first; it has no workers of its own."""
    port = free_port()
    settings = Settings(
        redis_url=redis_url, database_url=database_url, catalog=catalog_file, models_dir=models_dir,
        journal_dir=tmp_path / "second", listen=f"127.0.0.1:{port}", request_timeout_s=30.0,
    )  # fmt: skip
    gateway = Gateway(settings, catalog, SilentTelemetry(), gateway_id=f"gw-{port}")
    server = http_server(create_app(gateway, SilentTelemetry()), settings)
    headers = {"authorization": f"Bearer {rig.secret}"}
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, headers=headers)
    async with gateway.running(), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve())
        try:
            await eventually(lambda: reachable(client))
            yield client
        finally:
            await client.aclose()
            gateway.stop_streams()
            server.stop()
            await serving


async def reachable(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/livez")).status_code == 200
    except httpx.ConnectError:
        return False


async def begun(rig: Rig):
    """Serve the first word of the next request; return its id and handle."""
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode)
    handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
    await handle.tokens("begun ")
    await eventually(lambda: rig.gateway.table.find(submit.rid).accepted)
    return submit.rid, handle


async def asked_again(client: httpx.AsyncClient, body) -> httpx.Response:
    return await client.post("/v1/chat/completions", content=json.dumps(body), headers={"idempotency-key": "one"})


async def read_on(answer, chunks: list[str]) -> None:
    async for chunk in answer.aiter_text():
        chunks.append(chunk)  # noqa: PERF401 - the test looks at it meanwhile


def words(text: str) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content", "")
        for event in events_of(text)
        if event != "[DONE]" and event.get("choices")
    )


async def joined(rig: Rig, number: int = 1) -> None:
    """Wait until so many requests of this gateway look at an answer."""
    await eventually(lambda: rig.joins == number)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Let tests see how many joined, whichever gateway they came to."""
    Rig.joins = 0
    join = live_answers.LiveAnswers.join

    async def seen(self, *words, **named):
        Rig.joins += 1
        await join(self, *words, **named)

    monkeypatch.setattr(live_answers.LiveAnswers, "join", seen)
    yield
    del Rig.joins


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same gateway", "another replica"])
async def test_a_stream_is_joined_from_its_beginning_and_charged_once(rig: Rig, replica, elsewhere):
    second = replica if elsewhere else rig.client
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", STREAM))
        rid, handle = await begun(rig)
        chunks: list[str] = []
        headers = {"idempotency-key": "one"}
        async with second.stream("POST", "/v1/chat/completions", content=json.dumps(STREAM), headers=headers) as answer:
            assert answer.status_code == 200
            assert answer.headers["idempotent-replayed"] == "true"
            assert answer.headers["x-request-id"] == rid
            reading = tasks.create_task(read_on(answer, chunks))
            await eventually(lambda: "begun" in "".join(chunks))
            assert not asked.done(), "the second has it while the first one still runs"
            await handle.tokens("and ended")
            await handle.finish(FinishReason.STOP, prompt=8, completion=2)
            await reading
    first = asked.result()
    assert "".join(chunks) == first.text
    assert words(first.text) == "begun and ended"
    await rig.usage(rid)
    assert await spent(rig) == 1


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same gateway", "another replica"])
async def test_an_answer_in_one_piece_is_waited_for_and_charged_once(rig: Rig, replica, elsewhere):
    second = replica if elsewhere else rig.client
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one"))
        rid, handle = await begun(rig)
        again = [tasks.create_task(asked_again(second, HELLO)) for _ in range(2)]
        await joined(rig, 2)
        assert (await asked_again(second, {**HELLO, "seed": 1})).status_code == 422, "another body joins nothing"
        await handle.finish(FinishReason.STOP, prompt=8, completion=1)
    for task in again:
        assert task.result().content == asked.result().content
        assert task.result().headers["idempotent-replayed"] == "true"
    await rig.usage(rid)
    assert await spent(rig) == 1


async def test_a_refusal_is_told_to_who_joined_and_the_key_is_free(rig: Rig):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one"))
        submit = await rig.scheduler.submit()
        again = tasks.create_task(post(rig, "one"))
        await joined(rig)
        await rig.scheduler.refused(submit, "no_capacity", "full", 1)
    assert (asked.result().status_code, again.result().status_code) == (503, 503)
    assert again.result().json() == asked.result().json()
    assert not [key async for key in rig.redis.scan_iter(match="*:idem:*") if key.count(b":") == 3]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", STREAM),
        ("/v1/messages", {"model": "tiny", "max_tokens": 8, "stream": True,
                          "messages": [{"role": "user", "content": "Hello"}]}),
    ],
    ids=["chat", "messages"],
)  # fmt: skip
async def test_when_the_owner_dies_who_joined_its_stream_gets_one_error_in_the_endpoints_own_form(rig: Rig, path, body):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", body, path))
        _, handle = await begun(rig)
        await as_if_of_another(rig)
        chunks: list[str] = []
        async with rig.client.stream(
            "POST", path, content=json.dumps(body), headers={"idempotency-key": "one"}
        ) as answer:
            reading = tasks.create_task(read_on(answer, chunks))
            await eventually(lambda: "begun" in "".join(chunks))
            await rig.redis.delete(keys.gateway_lease("dead"))
            await reading
        text = "".join(chunks)
        assert text.count("idempotent_request_lost") == 1 or text.count("is gone. Send it again") == 1
        assert "[DONE]" not in text
        assert text.rstrip().splitlines()[-1].startswith("data: {")
        if path == "/v1/messages":
            assert text.rstrip().splitlines()[-2] == "event: error"
        await handle.finish(FinishReason.STOP, prompt=8, completion=1)
    assert asked.result().status_code == 200


async def test_when_the_owner_dies_before_it_answered_who_joined_gets_a_503_and_may_run_it_again(rig: Rig):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one"))
        _, handle = await begun(rig)
        await as_if_of_another(rig)
        again = tasks.create_task(post(rig, "one"))
        await joined(rig)
        await rig.redis.delete(keys.gateway_lease("dead"))
        await eventually(again.done)
        refused = again.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "idempotent_request_lost")
        assert refused.headers["retry-after"] == "1"
        third = tasks.create_task(post(rig, "one"))
        _, other = await begun(rig)
        await other.finish(FinishReason.STOP, prompt=8, completion=1)
        await handle.finish(FinishReason.STOP, prompt=8, completion=1)
    assert third.result().status_code == asked.result().status_code == 200
    assert "idempotent-replayed" not in third.result().headers


async def as_if_of_another(rig: Rig) -> None:
    """Make the only claim one of the gateway `dead`, which has a lease until the test takes it."""
    (place,) = [key async for key in rig.redis.scan_iter(match="*:idem:*") if key.count(b":") == 3]
    claim = await rig.redis.get(place)
    own = rig.gateway.gateway_id.encode()
    await rig.redis.set(keys.gateway_lease("dead"), "x")
    # msgpack: a string of up to 31 bytes is its length and its bytes
    assert bytes([0xA0 + len(own)]) + own in claim
    await rig.redis.set(place, claim.replace(bytes([0xA0 + len(own)]) + own, b"\xa4dead"))


async def test_frames_that_were_lost_on_the_way_come_from_the_kept_answer(rig: Rig, monkeypatch):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", STREAM))
        _, handle = await begun(rig)
        again = tasks.create_task(post(rig, "one", STREAM))
        await joined(rig)

        async def lost(self, frames):
            pass

        monkeypatch.setattr(live_answers.LiveAnswers, "_write", lost)
        await handle.tokens("and ended")
        await handle.finish(FinishReason.STOP, prompt=8, completion=2)
    assert again.result().text == asked.result().text
    assert words(again.result().text) == "begun and ended"


async def test_an_answer_over_the_cap_is_said_to_be_too_large_to_who_joined(rig: Rig, monkeypatch):
    monkeypatch.setattr("gateway.idempotency.MAX_BYTES", 100)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(post(rig, "one"))
        _, handle = await begun(rig)
        again = tasks.create_task(post(rig, "one"))
        await joined(rig)
        await handle.tokens("x" * 200)
        await handle.finish(FinishReason.STOP, prompt=8, completion=2)
    assert (again.result().status_code, again.result().json()["error"]["code"]) == (409, "idempotent_answer_not_kept")


async def test_a_client_that_leaves_while_it_reads_along_disturbs_nobody(rig: Rig):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", STREAM))
        rid, handle = await begun(rig)
        again = tasks.create_task(post(rig, "one", STREAM))
        await joined(rig)
        again.cancel()
        await handle.tokens("and ended")
        await handle.finish(FinishReason.STOP, prompt=8, completion=2)
    assert words(asked.result().text) == "begun and ended"
    await rig.usage(rid)
    assert await spent(rig) == 1
