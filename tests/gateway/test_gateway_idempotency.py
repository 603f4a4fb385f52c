"""`Idempotency-Key`: one answer, one charge, whatever becomes of the connection."""

import asyncio
import json

import pytest
from gateway_rig import HELLO, Rig, events_of, eventually

from contracts import keys
from contracts.lifecycle import FinishReason, Phase
from contracts.usage import Outcome
from gateway import idempotency

STREAM = {**HELLO, "stream": True}


async def post(rig: Rig, key: str, body: object = HELLO, path: str = "/v1/chat/completions", **headers: str):
    return await rig.client.post(path, content=json.dumps(body), headers={"idempotency-key": key, **headers})


async def serve(rig: Rig, *texts: str) -> str:
    """Answer the next request of the inbox, and return its id."""
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode)
    handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
    await handle.tokens(*texts)
    await handle.finish(FinishReason.STOP, prompt=8, completion=len(texts))
    return submit.rid


async def spent(rig: Rig) -> int:
    """Return the number of usage events."""
    return sum([await rig.redis.xlen(key) async for key in rig.redis.scan_iter(match="*:usage")])


@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])
async def test_the_same_request_again_gets_the_same_bytes_and_is_charged_once(rig: Rig, body):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", body))
        rid = await serve(rig, "only ", "once")
    first, again = asked.result(), await post(rig, "one", body)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-request-id"] == first.headers["x-request-id"] == rid
    assert again.headers["content-type"] == first.headers["content-type"]
    await rig.usage(rid)
    assert await spent(rig) == 1
    place = [key async for key in rig.redis.scan_iter(match="*:idem:*")]
    assert 0 < await rig.redis.pttl(place[0]) <= idempotency.KEEP_MS


async def test_another_body_under_the_same_key_is_422_and_another_endpoint_or_tenant_is_another_key(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one"))
        await serve(rig, "x")
    assert asked.result().status_code == 200
    other = await post(rig, "one", {**HELLO, "seed": 1})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", {"model": "tiny", "prompt": "Hello"}, "/v1/completions"))
        await serve(rig, "y")
    assert asked.result().status_code == 200
    await rig.tenant()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one"))
        await serve(rig, "z")
    assert asked.result().json()["choices"][0]["message"]["content"] == "z"


@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])
async def test_a_client_whose_connection_broke_finds_the_whole_answer_and_pays_once(rig: Rig, body):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", body))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await handle.tokens("begun ")
        await eventually(lambda: rig.gateway.table.find(submit.rid).accepted)
        asked.cancel()
    await handle.tokens("and ended")
    await handle.finish(FinishReason.STOP, prompt=8, completion=2)
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.tokens.decode) == (Outcome.FINISHED, 2)
    assert not rig.decode.aborts

    async def replayed():
        answer = await post(rig, "one", body)
        return answer if answer.status_code == 200 else None

    again = await eventually(replayed)
    assert again.headers["idempotent-replayed"] == "true"
    if body is STREAM:
        events = events_of(again.text)
        assert events[-1] == "[DONE]"
        said = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    else:
        said = again.json()["choices"][0]["message"]["content"]
    assert said == "begun and ended"
    assert await spent(rig) == 1


async def test_an_answer_that_broke_off_frees_its_key(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", STREAM))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        await eventually(lambda: rig.gateway.table.find(submit.rid).placed)
        await rig.scheduler.refused(submit, "interrupted", "over")
    assert events_of(asked.result().text)[-1]["error"]["code"] == "interrupted"
    refused = None
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", STREAM))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "full", 1)
    refused = asked.result()
    assert refused.status_code == 503  # and that is not kept either
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one", STREAM))
        await serve(rig, "at last")
    assert "at last" in asked.result().text
    assert "idempotent-replayed" not in asked.result().headers


async def test_the_key_of_a_dead_gateway_is_free(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one"))
        await rig.scheduler.submit()
        (place,) = [key async for key in rig.redis.scan_iter(match="*:idem:*")]
        claim = await rig.redis.get(place)
        await rig.redis.set(place, claim.replace(rig.gateway.gateway_id.encode(), b"x" * len(rig.gateway.gateway_id)))
        second = tasks.create_task(post(rig, "one"))
        await serve(rig, "again")
        await eventually(second.done)
        asked.cancel()
    assert second.result().json()["choices"][0]["message"]["content"] == "again"


async def test_an_answer_over_the_cap_is_not_kept_and_not_run_again(rig: Rig, monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_BYTES", 100)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, "one"))
        await serve(rig, "x" * 200)
    assert len(asked.result().content) > 200
    again = await post(rig, "one")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotent_answer_not_kept")
    assert again.headers["x-should-retry"] == "false"


async def test_a_wrong_key_is_said_and_a_wrong_caller_is_refused(rig: Rig):
    assert (await post(rig, "x" * 256)).status_code == 400
    assert (await post(rig, "")).status_code == 400
    assert (await post(rig, "one", authorization="Bearer pdg_" + "x" * 43)).status_code == 401
    assert not [key async for key in rig.redis.scan_iter(match="*:idem:*")]


async def test_head_is_get_without_a_body_and_405_names_what_is_allowed(rig: Rig):
    head, got = await rig.client.head("/v1/models"), await rig.client.get("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    assert (await rig.client.head("/livez")).status_code == 200
    for path, allowed in (("/v1/models", "GET, HEAD, OPTIONS"), ("/v1/models/a/b", "GET, HEAD, OPTIONS")):
        answer = await rig.client.delete(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    answer = await rig.client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "OPTIONS, POST")
    assert (await rig.client.head("/v1/chat/completions")).status_code == 405


async def test_workers_are_named_to_keys_that_may_see_them(rig: Rig):
    from gateway.scopes import Scopes
    from gateway.tenants import publish_key_state

    key, secret = await rig.tenants.create_key(rig.org.id, rig.project.id, "ops", scopes=Scopes(sees_workers=True))
    await publish_key_state(rig.redis, key)
    for authorization, seen in ((f"Bearer {secret}", True), (f"Bearer {rig.secret}", False)):
        for body in (HELLO, {**STREAM, "stream_options": {"include_usage": True}}):
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(
                    rig.client.post("/v1/chat/completions", json=body, headers={"authorization": authorization})
                )
                submit = await rig.scheduler.submit()
                await rig.scheduler.placed(submit, decode=rig.decode)
                await eventually(lambda rid=submit.rid: rig.gateway.table.find(rid).placed)
                handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
                await handle.tokens("x")
                await handle.finish(FinishReason.STOP, prompt=8, completion=1)
            headers = asked.result().headers
            assert headers["x-pdgate-path"] == "unified"
            assert int(headers["openai-processing-ms"]) >= 0
            workers = f"prefill={rig.decode.worker_id}, decode={rig.decode.worker_id}"
            assert headers.get("x-pdgate-workers") == (workers if seen else None)
            named = asked.result().json() if body is HELLO else events_of(asked.result().text)[-2]
            both = {"prefill": rig.decode.worker_id, "decode": rig.decode.worker_id}
            assert named["pdgate"].get("workers") == (both if seen else None)
            if body is HELLO:
                assert headers["x-pdgate-cached-tokens"] == "0"
                assert headers["x-pdgate-cost"] == "0.0000012"  # 8 computed at 100, 1 generated at 400 nano-units
    assert keys.idempotent("org_1", "x").endswith(":idem:x")
