"""Anthropic's messages: the translation, the events in their order, errors in their shape."""

import asyncio
import json
from typing import Any

import pytest
from gateway_rig import Rig

from contracts.errors import BadRequest
from contracts.lifecycle import FinishReason, Phase
from contracts.parsing import Detail, ToolCallDelta
from gateway.messages import MessageStream
from gateway.schemas.answers import Telling
from gateway.schemas.messages import anthropic_body, arguments_of, stop_reason_of
from gateway.writer import EventWriter

ASK = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}


def sse(body: str) -> list[tuple[str, Any]]:
    """Return name and data of each event."""
    found = []
    for block in body.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def send(rig: Rig, *pieces: str, reason: FinishReason = FinishReason.STOP, cached: int = 0, **body: object):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/messages", json={**ASK, **body}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        for piece in pieces:
            await handle.tokens(piece)
        prompt = len(submit.prompt) // 4
        await handle.finish(reason, prompt=prompt, cached=cached, completion=len(pieces))
    return submit, asked.result()


async def test_a_message_has_anthropics_shape_and_counts_cached_tokens_apart(rig: Rig):
    submit, answer = await send(rig, "Hi", " there", cached=2, system="Be brief.", temperature=0.5, top_k=3)
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"] == f"msg_{submit.rid}"
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == [{"type": "text", "text": "Hi there"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    prompt = len(submit.prompt) // 4
    assert body["usage"] == {
        "input_tokens": prompt - 2,
        "output_tokens": 2,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == submit.rid
    assert (submit.sampling.max_tokens, submit.sampling.temperature, submit.sampling.top_k) == (8, 0.5, 3)
    assert (await rig.client.get(f"/v1/requests/{body['id']}")).json()["id"] == submit.rid


async def test_a_stream_has_anthropics_events_in_their_order(rig: Rig):
    submit, answer = await send(rig, "Hi", "", " ☃", reason=FinishReason.LENGTH, stream=True)
    events = sse(answer.text)
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    start = events[0][1]["message"]
    assert (start["id"], start["content"], start["stop_reason"]) == (f"msg_{submit.rid}", [], None)
    assert start["usage"]["input_tokens"] == len(submit.prompt) // 4
    assert events[2][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert deltas == [{"type": "text_delta", "text": "Hi"}, {"type": "text_delta", "text": " ☃"}]
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 3
    assert "[DONE]" not in answer.text


async def test_a_broken_stream_ends_with_one_error_event(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/messages", json={**ASK, "stream": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await handle.tokens("x")
        await handle.finish(FinishReason.ERROR, prompt=3, completion=1)
        await rig.scheduler.refused(submit, "no_capacity", "no other worker")
    *_, (name, data) = sse(asked.result().text)
    assert name == "error"
    assert data["type"] == "error"
    assert "message_stop" not in asked.result().text


@pytest.mark.parametrize(
    ("body", "headers", "status", "kind"),
    [
        ({"messages": []}, {}, 400, "invalid_request_error"),
        ({"max_tokens": None}, {}, 400, "invalid_request_error"),
        ({"model": "none"}, {}, 404, "not_found_error"),
        ({}, {"authorization": "Bearer pdg_wrong"}, 401, "authentication_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            {},
            400,
            "invalid_request_error",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {}, 400, "invalid_request_error"),
    ],
)
async def test_refusals_have_anthropics_error_shape(rig: Rig, body, headers, status: int, kind: str):
    answer = await rig.client.post("/v1/messages", json={**ASK, **body}, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["request-id"]


async def test_tokens_are_counted_as_the_prompt_is_submitted(rig: Rig):
    body = {key: value for key, value in ASK.items() if key != "max_tokens"}
    counted = await rig.client.post(
        "/v1/messages/count_tokens", json={**body, "system": [{"type": "text", "text": "Be brief."}]}
    )
    submit, _ = await send(rig, "x", system="Be brief.")
    assert counted.json() == {"input_tokens": len(submit.prompt) // 4}


# -- without a gateway -------------------------------------------------------------------------------------------


def message_stream() -> MessageStream:
    writer = EventWriter(asyncio.get_running_loop())
    return MessageStream(writer, message_id="msg_1", model="m", prompt_tokens=3, telling=Telling("EUR"))


async def test_reasoning_text_and_calls_are_blocks_of_their_own_one_after_the_other():
    stream = message_stream()
    stream.detailed(0, "", Detail(reasoning="Hm"))
    stream.detailed(0, "", Detail(reasoning="m."))
    stream.piece(0, "Let me look.")
    stream.detailed(0, "", Detail(tool_calls=(ToolCallDelta(index=0, id="call_a", name="look"),)))
    stream.detailed(0, "", Detail(tool_calls=(ToolCallDelta(index=0, arguments='{"a":'),)))
    stream.detailed(0, "", Detail(tool_calls=(ToolCallDelta(index=0, arguments="1}"),)))
    stream.detailed(0, "", Detail(tool_calls=(ToolCallDelta(index=1, id="call_b", name="look", arguments="{}"),)))
    stream.sample_finished(0, FinishReason.STOP)
    events = sse(b"".join(stream.writer.pending).decode())
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2] == {"type": "tool_use", "id": "call_a", "name": "look", "input": {}}
    pieces = [(d["index"], d["delta"].get("partial_json")) for n, d in events if n == "content_block_delta"]
    assert [piece for piece in pieces if piece[0] >= 2] == [(2, '{"a":'), (2, "1}"), (3, "{}")]
    stops = [data["index"] for name, data in events if name == "content_block_stop"]
    assert stops == [0, 1, 2, 3]


def test_what_ended_a_message_is_told_in_anthropics_words():
    assert stop_reason_of(FinishReason.LENGTH, "", 1) == ("max_tokens", None)
    assert stop_reason_of(FinishReason.STOP, "", 1) == ("tool_use", None)
    assert stop_reason_of(FinishReason.STOP, "END", 0) == ("stop_sequence", "END")
    assert stop_reason_of(FinishReason.STOP, "", 0) == ("end_turn", None)


def test_arguments_that_are_no_object_are_kept_as_text():
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert arguments_of("") == {}
    assert arguments_of('{"a": ') == {"_raw": '{"a": '}
    assert arguments_of("[1]") == {"_raw": "[1]"}


def test_an_error_says_code_and_param_beside_anthropics_fields():
    body = anthropic_body(BadRequest("no", param="x"), "rid")
    assert body["error"] == {"type": "invalid_request_error", "message": "no", "code": "invalid_request", "param": "x"}
