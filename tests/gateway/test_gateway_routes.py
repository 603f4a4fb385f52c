"""JSON answers, models, requests and health."""

import asyncio
import time

from gateway_rig import HELLO, POOL, Rig, eventually

from contracts import keys
from contracts.lifecycle import FinishReason, Phase
from gateway.bounds import Bounds
from gateway.limits import Limits


async def answer_json(rig: Rig, **body: object):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json={**HELLO, **body}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        await (await rig.prefill.open(submit.rid, Phase.PREFILL)).finish(FinishReason.STOP, prompt=10, cached=4)
        decode = await rig.decode.open(submit.rid, Phase.DECODE)
        await decode.tokens("Hi", " there")
        await decode.finish(FinishReason.LENGTH, completion=2)
    return submit, asked.result()


async def test_a_json_answer_has_usage_the_pdgate_object_and_headers(rig: Rig):
    submit, answer = await answer_json(rig, max_tokens=2, temperature=0.5, seed=7, stop=["END"], user="u1")
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"] == f"chatcmpl-{submit.rid}"
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there", "refusal": None},
            "finish_reason": "length",
            "logprobs": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 10
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    cost_nano = 6 * 100 + 4 * 20 + 2 * 400
    assert (body["pdgate"]["cost_nano"], body["pdgate"]["cost"]) == (cost_nano, "0.00000148")
    headers = answer.headers
    assert headers["x-request-id"] == submit.rid
    assert headers["x-pdgate-path"] == "pd"
    assert headers["x-pdgate-cached-tokens"] == "4"
    assert headers["x-pdgate-cost"] == "0.00000148"
    assert int(headers["openai-processing-ms"]) >= 0


async def test_the_submit_carries_the_sampling_the_owner_and_the_salt(rig: Rig):
    submit, _ = await answer_json(
        rig, max_completion_tokens=2, temperature=0.5, top_p=0.9, seed=7, stop="END", user="u"
    )
    assert submit.sampling.max_tokens == 2
    assert (submit.sampling.temperature, submit.sampling.top_p) == (0.5, 0.9)
    assert (submit.sampling.seed, submit.sampling.stop) == (7, ("END",))
    assert (submit.owner.org, submit.owner.key_id, submit.owner.model) == (rig.org.id, rig.key.id, "tiny")
    assert submit.owner.price.decode == 400_000_000
    assert submit.session == "u"
    first_salt = submit.cache_salt
    await rig.tenant()
    other, _ = await answer_json(rig)
    assert first_salt
    assert other.cache_salt != first_salt
    assert other.sampling.max_tokens == 256  # the model's default


async def test_the_context_bounds_the_answer_whatever_was_asked(rig: Rig):
    messages = [{"role": "user", "content": "contract " * 300}]
    submit, _ = await answer_json(rig, messages=messages, max_tokens=100_000)
    assert submit.sampling.max_tokens == 2048 - len(submit.prompt) // 4


async def test_content_may_be_a_list_of_texts_and_renders_as_their_concatenation(rig: Rig):
    plain, _ = await answer_json(rig)
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    split, _ = await answer_json(rig, messages=[{"role": "user", "content": parts}])
    assert split.prompt == plain.prompt


async def test_models_show_context_prices_and_targets(rig: Rig):
    answer = (await rig.client.get("/v1/models")).json()
    (model,) = answer["data"]
    assert answer["object"] == "list"
    assert model["id"] == "tiny"
    assert model["context_length"] == 2048
    assert model["price"] == {
        "prefill_computed": "0.1",
        "prefill_cached": "0.02",
        "decode": "0.4",
        "currency": "EUR",
        "version": model["price"]["version"],
    }
    assert model["tiers"] == {"default": {"ttft_ms": 2000.0, "tpot_ms": 100.0}}
    assert (model["ready"], model["simulated"]) == (True, True)
    assert (await rig.client.get("/v1/models/tiny-alias")).json() == model
    missing = await rig.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (await rig.client.get("/v1/models", headers={"authorization": ""})).status_code == 401


async def test_a_request_can_be_read_while_it_runs_and_after_it_is_settled(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        queued = (await rig.client.get(f"/v1/requests/{submit.rid}")).json()
        assert (queued["status"], queued["model"], queued["organisation"]) == ("queued", "tiny", rig.org.id)
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        await (await rig.prefill.open(submit.rid, Phase.PREFILL)).finish(FinishReason.STOP, prompt=10, cached=4)
        decode = await rig.decode.open(submit.rid, Phase.DECODE)
        await decode.tokens("x")
        await eventually(lambda: rig.gateway.table.find(submit.rid).accepted)
        running = (await rig.client.get(f"/v1/requests/{submit.rid}")).json()
        assert (running["status"], running["path"]) == ("running", "pd")
        await decode.finish(FinishReason.STOP, completion=1)
    await rig.usage(submit.rid)
    settled = (await rig.client.get(f"/v1/requests/chatcmpl-{submit.rid}")).json()
    assert (settled["status"], settled["path"], settled["hand_off"]) == ("finished", "pd", "direct")
    assert [(row["meter"], row["tokens"], row["cost_nano"], row["worker"]) for row in settled["meters"]] == [
        ("prefill_computed", 6, 600, "prefill-0"),
        ("prefill_cached", 4, 80, "prefill-0"),
        ("decode", 1, 400, "decode-0"),
    ]
    assert settled["cost_nano"] == 1080
    assert settled["usage"]["total_tokens"] == 11
    await rig.tenant()
    other = await rig.client.get(f"/v1/requests/{submit.rid}")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "not_found")
    other_forms = (f"{{{submit.rid}}}", f"urn:uuid:{submit.rid}", submit.rid.replace("-", ""))
    for nonsense in ("abc", "chatcmpl-1", submit.rid[:-1] + "0", *other_forms):
        assert (await rig.client.get(f"/v1/requests/{nonsense}")).status_code == 404


async def test_a_lease_that_cannot_be_read_hides_no_other_worker(rig: Rig):
    known = {worker.worker_id for worker in rig.gateway.fleet.pool(POOL).workers}
    assert known
    await rig.redis.set(keys.worker_lease(POOL, "from-another-version"), b"\x81\xa1v\x63")
    await rig.redis.zadd(keys.pool_workers(POOL), {"from-another-version": 2**50})
    await rig.gateway.fleet.look()
    assert {worker.worker_id for worker in rig.gateway.fleet.pool(POOL).workers} == known


async def test_health_and_schema_need_no_key(rig: Rig):
    del rig.client.headers["authorization"]
    assert (await rig.client.get("/livez")).json() == {"status": "ok"}
    ready = await rig.client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json() == {
        "ready": True,
        "redis": True,
        "postgres": True,
        "workers_attached": 2,
        "models": {"tiny": []},
    }
    assert (await rig.client.get("/metrics")).status_code == 200
    schema = (await rig.client.get("/schema")).json()
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages"} <= set(body["required"])
    assert body["properties"]["temperature"]
    assert {"/v1/models", "/v1/requests/{request_id}", "/readyz"} <= set(schema["paths"])


async def test_keys_are_listed_without_secrets_and_limits_can_be_replaced(rig: Rig):
    (key,) = await rig.tenants.list_keys(rig.org.id)
    assert rig.secret.startswith(key.prefix)
    assert rig.secret not in repr(key)
    (changed,) = await Bounds(rig.gateway.engine).set_organisation(rig.org.id, limits=Limits(requests_per_minute=3))
    assert changed.version == key.version + 1
    assert changed.organisation_limits == Limits(requests_per_minute=3)


async def test_a_call_after_an_answer_finds_its_slot_free_however_late_that_is_settled(rig: Rig, monkeypatch):
    settlement = rig.gateway.settlement
    settle_all = settlement._settle_all

    async def slowly(*batch):
        await asyncio.sleep(0.3)
        await settle_all(*batch)

    await rig.tenant(limits=Limits(concurrent_requests=1))
    monkeypatch.setattr(settlement, "_settle_all", slowly)
    for _ in range(3):
        _, answer = await answer_json(rig, max_tokens=2)
        assert answer.status_code == 200


async def test_a_gateway_whose_clock_is_ahead_sees_every_worker_that_has_a_lease(rig: Rig):
    """Leases end by Redis' clock. A gateway that compared their index with its own refused everybody after a jump."""
    known = {worker.worker_id for worker in rig.gateway.fleet.pool(POOL).workers}
    behind_ms = int(time.time() * 1000) - 120_000
    await rig.redis.zadd(keys.pool_workers(POOL), dict.fromkeys(known, behind_ms))
    await rig.gateway.fleet.look()
    assert {worker.worker_id for worker in rig.gateway.fleet.pool(POOL).workers} == known != set()
