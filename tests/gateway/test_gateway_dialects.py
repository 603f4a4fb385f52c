"""What chats can do, messages and responses can: tools, schemas, reasoning, log probabilities, in their own words."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import Rig, running_rig

from contracts.catalog import read_catalog
from contracts.lifecycle import FinishReason, Phase
from contracts.parsing import Detail, TokenLogprob, ToolCallDelta, detail_to_pb
from contracts.wire import Submit, pack_ids

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLED = (
    Detail(reasoning="Hm."),
    Detail(tool_calls=(ToolCallDelta(index=0, id="call_1", name="weather"),)),
    Detail(tool_calls=(ToolCallDelta(index=0, arguments='{"city":'),)),
    Detail(tool_calls=(ToolCallDelta(index=0, arguments='"Ulm"}'),)),
)
MESSAGE = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA, "strict": True}],
}
RESPONSE = {
    "model": "tiny",
    "input": "Weather?",
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
}


@pytest.fixture
def own_catalog(catalog_file: Path, tmp_path: Path) -> Path:
    """A model that calls tools and reasons."""
    own = tmp_path / "models.toml"
    parsers = 'tool_parser = "hermes"\nreasoning_parser = "qwen3"\n'
    own.write_text(catalog_file.read_text().replace("[models.tiny]\n", f"[models.tiny]\n{parsers}"))
    return own


@pytest.fixture
async def rig(
    redis_url: str, database_url: str, own_catalog: Path, models_dir: Path, tmp_path: Path
) -> AsyncIterator[Rig]:
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=own_catalog,
        catalog=read_catalog(own_catalog),
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
    ) as running:
        yield running


async def answer(rig: Rig, path: str, body: dict[str, Any], *details: Detail) -> tuple[Submit, Any]:
    """Ask, and have each detail come as a chunk of its own."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post(path, json=body))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        for detail in details:
            text = b"".join(token.token for token in detail.logprobs).decode()
            await rig.decode.send(
                handle=[handle.handle],
                text=[text],
                num_tokens=[1],
                token_ids=pack_ids([1]),
                details=[detail_to_pb(0, detail)],
            )
        await handle.finish(FinishReason.STOP, prompt=9, completion=len(details))
    return submit, asked.result()


def sse(body: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in body.split("\n") if line.startswith("data: {")]


async def test_a_message_calls_a_tool_and_is_told_what_it_gave(rig: Rig):
    submit, got = await answer(rig, "/v1/messages", {**MESSAGE, "tool_choice": {"type": "any"}}, *CALLED)
    assert (submit.parsing.tool_choice, submit.parsing.tool_parser) == ("required", "hermes")
    function = json.loads(submit.parsing.tools)[0]["function"]
    assert (function["parameters"], function["strict"]) == (SCHEMA, True)
    body = got.json()
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ulm"}},
    ]
    assert body["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "mild"}]}
    history = [
        *MESSAGE["messages"],
        {"role": "assistant", "content": body["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks"}]},
    ]
    again, got = await answer(rig, "/v1/messages", {**MESSAGE, "messages": history})
    assert got.status_code == 200
    assert len(again.prompt) > len(submit.prompt)
    counted = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
    count = await rig.client.post("/v1/messages/count_tokens", json={**counted, "messages": history})
    assert count.json()["input_tokens"] == len(again.prompt) // 4


async def test_a_message_streams_its_call_in_blocks(rig: Rig):
    chosen = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    submit, got = await answer(rig, "/v1/messages", {**MESSAGE, "stream": True, "tool_choice": chosen}, *CALLED)
    assert (submit.parsing.tool_name, submit.parsing.parallel_tool_calls) == ("weather", False)
    events = sse(got.text)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "tool_use"]
    pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta" and e["index"] == 1]
    assert json.loads("".join(pieces)) == {"city": "Ulm"}
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["tool_use"]


async def test_a_response_calls_a_function_and_goes_on_with_its_output(rig: Rig):
    submit, got = await answer(rig, "/v1/responses", {**RESPONSE, "tool_choice": "required"}, *CALLED)
    assert submit.parsing.tool_choice == "required"
    body = got.json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "function_call"]
    call = body["output"][1]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "weather", '{"city":"Ulm"}')
    output = {"type": "function_call_output", "call_id": "call_1", "output": "mild"}
    follow = {**RESPONSE, "input": [output], "previous_response_id": body["id"]}
    again, got = await answer(rig, "/v1/responses", follow)
    assert got.json()["status"] == "completed"
    assert len(again.prompt) > len(submit.prompt)


async def test_a_response_streams_reasoning_and_call_as_items(rig: Rig):
    _, got = await answer(rig, "/v1/responses", {**RESPONSE, "stream": True}, *CALLED)
    events = sse(got.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ["reasoning", "function_call"]
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == '{"city":"Ulm"}'
    assert [item["type"] for item in events[-1]["response"]["output"]] == done


async def test_a_response_may_have_to_match_a_schema_and_carry_log_probabilities(rig: Rig):
    other = TokenLogprob(id=2, logprob=-2.0, token=b"Ho")
    token = Detail(logprobs=(TokenLogprob(id=1, logprob=-0.5, token=b"Hi", top=(other,)),))
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    body = {
        "model": "tiny",
        "input": "Where?",
        "text": {"format": form},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    submit, got = await answer(rig, "/v1/responses", body, token)
    assert submit.sampling.grammar.kind == "json_schema"
    assert submit.sampling.top_logprobs == 1
    (part,) = got.json()["output"][0]["content"]
    assert part["text"] == "Hi"
    assert (part["logprobs"][0]["token"], part["logprobs"][0]["logprob"]) == ("Hi", -0.5)
    assert part["logprobs"][0]["top_logprobs"][0]["token"] == "Ho"
    assert got.json()["text"]["format"] == form


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_has_log_probabilities_in_the_legacy_form(rig: Rig, stream: bool):
    def token(text: bytes, logprob: float) -> Detail:
        other = TokenLogprob(id=2, logprob=-3.0, token=b"x")
        return Detail(logprobs=(TokenLogprob(id=1, logprob=logprob, token=text, top=(other,)),))

    body = {"model": "tiny", "prompt": "Say", "logprobs": 1, "stream": stream}
    submit, got = await answer(rig, "/v1/completions", body, token(b"Hi", -0.5), token(b" you", -0.25))
    assert submit.sampling.top_logprobs == 1
    found = [got.json()["choices"][0]] if not stream else [event["choices"][0] for event in sse(got.text)]
    told = [choice["logprobs"] for choice in found if choice["logprobs"]]
    assert "".join(choice["text"] for choice in found) == "Hi you"
    assert [offset for one in told for offset in one["text_offset"]] == [0, 2]
    assert [text for one in told for text in one["tokens"]] == ["Hi", " you"]
    assert [logprob for one in told for logprob in one["token_logprobs"]] == [-0.5, -0.25]
    assert all(top == {"x": -3.0} for one in told for top in one["top_logprobs"])
