"""OpenAI's responses: events in their exact order, stored responses, background and cancellation."""

import asyncio
import json
from typing import Any

import pytest
from gateway_rig import Rig, eventually

from contracts import keys
from contracts.errors import BadRequest
from contracts.lifecycle import FinishReason, Phase
from contracts.parsing import Detail, ToolCallDelta
from contracts.usage import Outcome
from gateway.response_book import Kept
from gateway.responses import Keeper, ResponseStream
from gateway.schemas.answers import Telling
from gateway.schemas.response_objects import Response
from gateway.schemas.responses import InputItem, messages_of
from gateway.writer import EventWriter

ASK = {"model": "tiny", "input": "Hello"}


def sse(body: str) -> list[tuple[str, Any]]:
    found = []
    for block in body.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def play(rig: Rig, *pieces: str, reason: FinishReason = FinishReason.STOP):
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode)
    handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
    for piece in pieces:
        await handle.tokens(piece)
    await handle.finish(reason, prompt=len(submit.prompt) // 4, cached=1, completion=len(pieces))
    return submit


async def respond(rig: Rig, *pieces: str, reason: FinishReason = FinishReason.STOP, **body: object):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/responses", json={**ASK, **body}))
        submit = await play(rig, *pieces, reason=reason)
    return submit, asked.result()


async def test_a_response_has_openais_shape_and_can_be_retrieved_and_deleted(rig: Rig):
    submit, answer = await respond(rig, "Hi", " there", instructions="Be brief.", metadata={"a": "b"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["id"], body["object"], body["status"]) == (f"resp_{submit.rid}", "response", "completed")
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hi there", "annotations": [], "logprobs": []}]
    prompt = len(submit.prompt) // 4
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 2,
    }
    assert (body["metadata"], body["instructions"], body["error"]) == ({"a": "b"}, "Be brief.", None)
    again = await rig.client.get(f"/v1/responses/{body['id']}")
    assert again.json() == body
    items = (await rig.client.get(f"/v1/responses/{body['id']}/input_items")).json()
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "Hello"}]
    await rig.tenant()
    assert (await rig.client.get(f"/v1/responses/{body['id']}")).status_code == 404  # another organisation's
    assert (await rig.client.delete(f"/v1/responses/{body['id']}")).status_code == 404


async def test_a_deleted_response_is_gone_and_one_not_stored_never_was(rig: Rig):
    submit, answer = await respond(rig, "x")
    deleted = await rig.client.delete(f"/v1/responses/{answer.json()['id']}")
    assert deleted.json()["deleted"] is True
    assert (await rig.client.get(f"/v1/responses/resp_{submit.rid}")).status_code == 404
    submit, _ = await respond(rig, "x", store=False)
    assert (await rig.client.get(f"/v1/responses/resp_{submit.rid}")).status_code == 404


async def test_a_stream_has_openais_events_in_their_order_with_rising_sequence_numbers(rig: Rig):
    _, answer = await respond(rig, "Hi", "", " ☃", stream=True)
    events = sse(answer.text)
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(10))
    deltas = [data for name, data in events if name == "response.output_text.delta"]
    assert [data["delta"] for data in deltas] == ["Hi", " ☃"]
    item_id = events[2][1]["item"]["id"]
    assert all(data["item_id"] == item_id and data["content_index"] == 0 for data in deltas)
    done = dict(events)
    assert done["response.output_text.done"]["text"] == "Hi ☃"
    assert done["response.completed"]["response"]["output"] == [done["response.output_item.done"]["item"]]
    assert done["response.completed"]["response"]["usage"]["output_tokens"] == 3
    assert "[DONE]" not in answer.text


async def test_an_answer_cut_by_length_is_incomplete(rig: Rig):
    _, answer = await respond(rig, "x", reason=FinishReason.LENGTH, max_output_tokens=1)
    assert (answer.json()["status"], answer.json()["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    _, streamed = await respond(rig, "x", reason=FinishReason.LENGTH, max_output_tokens=1, stream=True)
    assert sse(streamed.text)[-1][0] == "response.incomplete"


async def test_a_response_goes_on_from_the_previous_one(rig: Rig):
    _, first = await respond(rig, "Hi", instructions="Be brief.")
    second, answer = await respond(rig, "x", previous_response_id=first.json()["id"], input="And now?")
    assert answer.json()["previous_response_id"] == first.json()["id"]
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "And now?"},
    ]
    whole = await rig.client.post("/v1/tokenize", json={"model": "tiny", "messages": turns})
    assert whole.json()["count"] == len(second.prompt) // 4  # the instructions of the first are not carried over
    missing = await rig.client.post("/v1/responses", json={**ASK, "previous_response_id": "resp_none"})
    assert missing.status_code == 404


async def test_a_background_response_is_queued_then_completed(rig: Rig):
    answer = await rig.client.post("/v1/responses", json={**ASK, "background": True})
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    response_id = answer.json()["id"]
    assert (await rig.client.get(f"/v1/responses/{response_id}")).json()["status"] == "queued"
    refused = await rig.client.delete(f"/v1/responses/{response_id}")
    assert refused.status_code == 400
    submit = await play(rig, "done")

    async def completed() -> Any:
        body = (await rig.client.get(f"/v1/responses/{response_id}")).json()
        return body if body["status"] == "completed" else None

    body = await eventually(completed)
    assert body["output"][0]["content"][0]["text"] == "done"
    assert (await rig.usage(submit.rid)).outcome is Outcome.FINISHED
    stored = await eventually(lambda: rig.redis.get(keys.response(rig.org.id, response_id)))
    assert json.loads(stored)["response"]["status"] == "completed"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_cancelled_response_stops_its_workers_and_says_cancelled(rig: Rig, elsewhere: bool):
    answer = await rig.client.post("/v1/responses", json={**ASK, "background": True})
    response_id = answer.json()["id"]
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode)
    handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
    await handle.tokens("x")
    if elsewhere:  # another gateway leaves a mark
        await rig.redis.set(keys.response_cancel(rig.org.id, response_id), "1")
    else:
        cancelled = await rig.client.post(f"/v1/responses/{response_id}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    await eventually(lambda: [a for a in rig.decode.aborts if a.reason == "client_left"])
    await handle.finish(FinishReason.ABORTED, prompt=3, completion=1)
    assert (await rig.usage(submit.rid)).outcome is Outcome.CLIENT_LEFT
    again = await rig.client.post(f"/v1/responses/{response_id}/cancel")
    assert again.json()["status"] == "cancelled"


async def test_a_response_whose_gateway_died_is_told_as_failed(rig: Rig):
    response = Response(id="resp_1", created_at=1, model="tiny", status="in_progress", background=True)
    kept = Kept(org=rig.org.id, gateway_id="dead", response=response, input_items=[], conversation=[])
    import msgspec

    await rig.redis.set(keys.response(rig.org.id, "resp_1"), msgspec.json.encode(kept))
    answer = (await rig.client.get("/v1/responses/resp_1")).json()
    assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
async def test_what_a_response_cannot_do_is_refused_by_name(rig: Rig, body: dict[str, object], param: str):
    answer = await rig.client.post("/v1/responses", json={**ASK, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert await rig.nothing_queued_or_reserved()


# -- without a gateway -------------------------------------------------------------------------------------------


def test_input_items_become_chat_messages():
    items = [
        InputItem(role="user", content=[{"type": "input_text", "text": "Weather?"}]),
        InputItem(type="reasoning"),
        InputItem(role="assistant", content="Looking."),
        InputItem(type="function_call", call_id="c1", name="weather", arguments='{"city":"Ulm"}'),
        InputItem(type="function_call", call_id="c2", name="time"),
        InputItem(type="function_call_output", call_id="c1", output="sunny"),
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}},
        {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert messages_of(items) == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    with pytest.raises(BadRequest, match="call_id"):
        messages_of([InputItem(type="function_call")])


async def test_reasoning_and_calls_are_items_of_their_own():
    response = Response(id="resp_1", created_at=1, model="m", status="in_progress")
    kept = Kept(org="o", gateway_id="g", response=response, input_items=[], conversation=[])
    stream = ResponseStream(
        EventWriter(asyncio.get_running_loop()), Keeper(None, kept, telling=Telling("EUR")), rid="r"
    )
    stream.detailed(0, "", Detail(reasoning="Hm"))
    stream.detailed(0, "", Detail(tool_calls=(ToolCallDelta(index=0, id="call_a", name="look", arguments='{"a":'),)))
    stream.detailed(0, "", Detail(tool_calls=(ToolCallDelta(index=0, arguments="1}"),)))
    stream.sample_finished(0, FinishReason.STOP)
    events = sse(b"".join(stream.writer.pending).decode())
    assert [name for name, _ in events[2:]] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    item = events[-1][1]["item"]
    assert item == {
        "id": "fc_r_1",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_a",
        "name": "look",
        "arguments": '{"a":1}',
    }
