"""Requests that never run: the right error body, nothing queued, nothing reserved, nothing charged."""

import asyncio
import json

import pytest
from gateway_rig import HELLO, PeerWorker, Rig, events_of, eventually, running_rig

from contracts.lifecycle import Role
from contracts.usage import Outcome
from gateway.limits import Limits
from gateway.tenants import publish_key_state


async def post(rig: Rig, body: object, **headers: str):
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return await rig.client.post("/v1/chat/completions", content=content, headers=headers)


def error_of(answer) -> dict:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return body["error"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def named(name):
    return {"type": "function", "function": {"name": name}}


BAD_BODIES = [
    ("{not json", None),
    ("", None),
    ('{"deep":' * 50_000 + "1" + "}" * 50_000, None),
    ({"messages": [{"role": "user", "content": "x"}]}, "model"),
    ({"model": "tiny"}, "messages"),
    ({"model": "tiny", "messages": []}, "messages"),
    ({"model": "tiny", "messages": "hi"}, "messages"),
    ({"model": "tiny", "messages": [{"role": "user"}]}, "messages[0].content"),
    ({"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({**HELLO, "temperature": 3}, "temperature"),
    ({**HELLO, "temperature": "hot"}, "temperature"),
    ({**HELLO, "top_p": 1.5}, "top_p"),
    ({**HELLO, "max_tokens": 0}, "max_tokens"),
    ({**HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({**HELLO, "max_tokens": 1.5}, "max_tokens"),
    ({**HELLO, "n": 9}, "n"),
    ({**HELLO, "stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({**HELLO, "stop": ""}, "stop"),
    ({**HELLO, "seed": 2**64}, "seed"),
    ({**HELLO, "stream": "yes"}, "stream"),
    ({**HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**HELLO, "metadata": {"k": 1}}, "metadata[...]"),
    ({**HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({**HELLO, "tools": [TOOL]}, "tools"),  # the model calls none
    ({**HELLO, "tools": [TOOL, TOOL]}, "tools"),
    ({**HELLO, "tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({**HELLO, "tool_choice": "required"}, "tool_choice"),
    ({**HELLO, "tools": [TOOL], "tool_choice": named("g")}, "tool_choice"),
    ({**HELLO, "functions": [{"name": "f"}]}, "functions"),
    ({**HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({**HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    ({**HELLO, "response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    ({**HELLO, "response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": named("f")}, "tool_choice"),
    ({**HELLO, "regex": "(" * 65 + ")" * 65}, "regex"),
    ({**HELLO, "ebnf": "a" * 70_000}, "ebnf"),
    ({**HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**HELLO, "logit_bias": {"x": 2}}, "logit_bias"),
    ({**HELLO, "logit_bias": {"99999999": 2}}, "logit_bias"),
    ({**HELLO, "logit_bias": {"1": 101}}, "logit_bias"),
    ({**HELLO, "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({**HELLO, "reasoning_effort": "high"}, "reasoning_effort"),  # its template knows none
    ({**HELLO, "reasoning_effort": "huge"}, "reasoning_effort"),
    ({"model": "tiny", "messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {
            "model": "tiny",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {"type": "image_url", "image_url": {"url": "data:,"}},
                    ],
                }
            ],
        },
        "messages[0].content[1]",
    ),
]


async def test_a_bad_body_is_refused_with_the_name_of_the_field(rig: Rig):
    for body, param in BAD_BODIES:
        answer = await post(rig, body)
        error = error_of(answer)
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), (body, error)
        assert error["param"] == param, (body, error)
    assert await rig.nothing_queued_or_reserved()


async def test_null_and_unknown_fields_are_as_good_as_absent(rig: Rig):
    body = {**HELLO, "temperature": None, "tools": [], "logprobs": False, "whatever": {"deep": 1}, "stream": True}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, body))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "full", 3)
    assert asked.result().status_code == 503


async def test_a_wrong_a_malformed_and_a_missing_key_are_401(rig: Rig):
    for authorization in ("Bearer pdg_" + "x" * 43, "Bearer sk-other", "Basic abc", ""):
        answer = await post(rig, HELLO, authorization=authorization)
        assert answer.status_code == 401
        assert error_of(answer)["code"] == "invalid_api_key"
        assert "x" * 20 not in answer.text
    assert await rig.nothing_queued_or_reserved()


async def test_a_revoked_key_is_refused_at_the_next_request(rig: Rig):
    assert (await post(rig, {**HELLO, "model": "none"})).status_code == 404  # the key is in the gateway's cache
    await publish_key_state(rig.redis, await rig.tenants.revoke(rig.org.id, rig.key.id))
    answer = await post(rig, HELLO)
    assert answer.status_code == 401
    assert "revoked" in error_of(answer)["message"]
    assert (await rig.client.get("/v1/models")).status_code == 401
    assert await rig.nothing_queued_or_reserved()


async def test_a_rotated_key_works_with_its_new_secret_only(rig: Rig):
    assert (await post(rig, {**HELLO, "model": "none"})).status_code == 404
    key, secret = await rig.tenants.rotate(rig.org.id, rig.key.id)
    await publish_key_state(rig.redis, key)
    assert (await post(rig, HELLO)).status_code == 401
    assert (await post(rig, {**HELLO, "model": "none"}, authorization=f"Bearer {secret}")).status_code == 404


async def test_a_key_state_that_redis_lost_is_published_again_from_postgres(rig: Rig):
    await rig.redis.delete(*await rig.redis.keys("*:keys"))
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, {**HELLO, "stream": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "full", 1)
    assert asked.result().status_code == 503


async def test_an_unknown_model_is_404(rig: Rig):
    answer = await post(rig, {**HELLO, "model": "gpt-nothing"})
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"
    assert error_of(answer)["param"] == "model"


async def test_a_prompt_over_the_context_is_refused_before_anything_is_queued(rig: Rig):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "lighthouse keeper " * 3000}]}
    answer = await post(rig, body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    assert await rig.nothing_queued_or_reserved()


async def test_a_body_of_many_megabytes_is_read_and_a_larger_one_is_413(rig: Rig):
    large = {"model": "tiny", "messages": [{"role": "user", "content": "x" * (6 * 2**20)}]}
    answer = await post(rig, large)
    assert error_of(answer)["code"] == "context_length_exceeded"
    answer = await post(rig, b"x" * (8 * 2**20 + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_unknown_routes_and_methods_have_openai_bodies(rig: Rig):
    assert (await rig.client.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    answer = await rig.client.put("/v1/models")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_without_a_complete_path_the_answer_is_503_with_retry_after(rig: Rig):
    await rig.unregister(rig.prefill)
    await eventually(lambda: rig.gateway.models.missing("tiny"))
    answer = await post(rig, HELLO)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert error_of(answer)["code"] == "no_capacity"
    ready = await rig.client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["models"] == {"tiny": ["no ready prefill worker"]}
    assert (await rig.client.get("/readyz?every_model=false")).status_code == 200
    unified = PeerWorker("unified-0", Role.UNIFIED)
    await unified.start()
    await rig.register(unified)
    await eventually(lambda: not rig.gateway.models.missing("tiny"))
    assert (await rig.client.get("/readyz")).status_code == 200
    await unified.stop()
    assert await rig.nothing_queued_or_reserved()


async def test_the_schedulers_refusal_reaches_the_client_and_gives_the_reservation_back(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, {**HELLO, "stream": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "the queue is longer than your deadline", 7.5)
    answer = asked.result()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "8"
    assert error_of(answer)["message"] == "the queue is longer than your deadline"
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cost, event.tokens.prompt) == (Outcome.REFUSED, 0, 0)
    assert await rig.nothing_queued_or_reserved()


async def test_a_refusal_after_the_head_was_sent_is_an_error_event_without_done(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, {**HELLO, "stream": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        await eventually(lambda: rig.gateway.table.find(submit.rid).placed)
        await rig.scheduler.refused(submit, "interrupted", "3 attempts failed")
    answer = asked.result()
    assert answer.status_code == 200
    (event,) = events_of(answer.text)
    assert event["error"]["code"] == "interrupted"
    settled = await rig.usage(submit.rid)
    assert (settled.outcome, settled.cost) == (Outcome.INTERRUPTED, 0)


@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [
        (Limits(requests_per_minute=0), 429, "rate_limit_exceeded"),
        (Limits(prompt_tokens_per_minute=3), 429, "rate_limit_exceeded"),
        (Limits(generated_tokens_per_minute=15), 429, "rate_limit_exceeded"),
        (Limits(tokens_per_minute=20), 429, "rate_limit_exceeded"),
        (Limits(concurrent_requests=0), 429, "rate_limit_exceeded"),
        (Limits(budget_nano=1000), 429, "insufficient_quota"),
    ],
)
async def test_a_limit_refuses_and_burns_nothing(rig: Rig, limits: Limits, status: int, code: str):
    await rig.tenant(limits=limits)
    answer = await post(rig, HELLO)
    assert answer.status_code == status
    error = error_of(answer)
    assert error["code"] == code
    assert "API key" in error["message"]
    if code == "insufficient_quota":
        assert answer.headers["x-should-retry"] == "false"
    assert await rig.nothing_queued_or_reserved()
    assert not await rig.redis.keys("*:rate:*")  # no bucket was touched


async def test_a_call_without_max_tokens_shrinks_to_what_the_budget_leaves(rig: Rig):
    # 8 tokens of prompt cost at most 1,600 nano-units; 40 tokens of answer cost 16,000.
    await rig.tenant(org_limits=Limits(budget_nano=18_000))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(post(rig, HELLO))
        submit = await rig.scheduler.submit()
        prompt = len(submit.prompt) // 4
        assert submit.sampling.max_tokens == (18_000 - prompt * 100) // 400
        await rig.scheduler.refused(submit, "no_capacity", "full", 1)
    answer = await post(rig, {**HELLO, "max_tokens": 200})
    assert error_of(answer)["code"] == "insufficient_quota"


async def test_granted_requests_carry_what_is_left_of_the_limits(rig: Rig):
    await rig.tenant(limits=Limits(requests_per_minute=60, tokens_per_minute=6000))
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, {**HELLO, "max_tokens": 100, "stream": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        await eventually(lambda: rig.gateway.table.find(submit.rid).placed)
        await rig.scheduler.refused(submit, "interrupted", "over")
    headers = asked.result().headers
    prompt = len(submit.prompt) // 4
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-remaining-requests"] == "59"
    assert headers["x-ratelimit-remaining-tokens"] == str(6000 - 100 - prompt)
    assert headers["x-ratelimit-reset-requests"] == "1s"


async def test_a_full_inbox_refuses(redis_url, database_url, catalog_file, catalog, models_dir, tmp_path):
    services = {"redis_url": redis_url, "database_url": database_url, "journal_dir": tmp_path}
    files = {"catalog_file": catalog_file, "catalog": catalog, "models_dir": models_dir}
    async with running_rig(**services, **files, inbox_max_entries=1) as rig, asyncio.TaskGroup() as tasks:
        first = [tasks.create_task(post(rig, {**HELLO, "stream": True})) for _ in range(2)]
        submits = [await rig.scheduler.submit() for _ in first]
        await eventually(lambda: rig.gateway.fleet.pool("tiny").inbox_entries == 2)
        answer = await post(rig, HELLO)
        assert answer.status_code == 503
        assert "queue" in error_of(answer)["message"]
        for submit in submits:
            await rig.scheduler.refused(submit, "no_capacity", "full", 1)
