"""The official client over the whole stack and the real engine: tools, structured outputs, log probabilities, n."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, ConfigDict, Field

from tests.processes import Stack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ASK = {"messages": [{"role": "user", "content": "What is the weather?"}], "temperature": 0}


class Report(BaseModel):
    """An answer that even random weights can only give in full."""

    model_config = ConfigDict(extra="forbid")

    sky: Literal["blue", "grey"]
    degrees: Annotated[int, Field(ge=0, le=99)]


TOOL = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": Report.model_json_schema()},
}


@pytest.fixture
async def client(real_stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{real_stack.url}/v1", api_key=real_stack.api_key, max_retries=0, timeout=120
    ) as client:
        yield client


async def streamed(client: openai.AsyncOpenAI, **fields):
    """The completion that the official client makes of a stream."""
    state = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


async def test_the_official_client_calls_tools_and_parses_structured_outputs(client: openai.AsyncOpenAI):
    forced = {**ASK, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    one = await client.chat.completions.create(model="reference", **forced)
    whole = await client.chat.completions.create(model="tiny", **forced)
    stream = await streamed(client, model="tiny", **forced)
    arguments = set()
    for answer in (one, whole, stream):
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        Report.model_validate_json(call.function.arguments)
        arguments.add(call.function.arguments)
        assert not choice.message.content
    assert len(arguments) == 1  # streamed or not, pair or unified
    assert whole.choices[0].message.tool_calls[0].id != stream.choices[0].message.tool_calls[0].id

    history = [
        *ASK["messages"],
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": whole.choices[0].message.tool_calls[0].id, "content": "mild"},
    ]
    after = await client.chat.completions.create(
        model="tiny", messages=history, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=8
    )
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None

    parsed = await client.chat.completions.parse(model="tiny", response_format=Report, max_tokens=60, **ASK)
    assert isinstance(parsed.choices[0].message.parsed, Report)
    assert parsed.choices[0].finish_reason == "stop"
    in_pattern = await client.chat.completions.create(
        model="tiny", max_tokens=40, extra_body={"regex": "(foo|bar)[0-9]{4}"}, **ASK
    )
    assert in_pattern.choices[0].message.content[:3] in ("foo", "bar")


async def test_log_probabilities_samples_and_refusals_over_the_whole_stack(client: openai.AsyncOpenAI):
    with_logprobs = {**ASK, "logprobs": True, "top_logprobs": 2, "max_tokens": 10}
    one = await client.chat.completions.create(model="reference", **with_logprobs)
    whole = await client.chat.completions.create(model="tiny", **with_logprobs)
    stream = await streamed(client, model="tiny", **with_logprobs)
    tokens = [[entry.bytes for entry in answer.choices[0].logprobs.content] for answer in (one, whole, stream)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[0]) == 10
    said = bytes(byte for entry in tokens[1] for byte in entry)
    assert said.decode("utf-8", "replace") == whole.choices[0].message.content
    for mine, theirs in zip(whole.choices[0].logprobs.content, one.choices[0].logprobs.content, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [other.token for other in mine.top_logprobs] == [other.token for other in theirs.top_logprobs]

    samples = {**ASK, "temperature": 1, "n": 3, "seed": 11, "max_tokens": 8, "model": "tiny"}
    first = await client.chat.completions.create(**samples)
    texts: dict[int, str] = {0: "", 1: "", 2: ""}
    async for chunk in await client.chat.completions.create(**samples, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in first.choices] == list(texts.values())
    assert len(set(texts.values())) == 3
    assert first.usage.completion_tokens == 24

    biased = await client.chat.completions.create(model="tiny", logit_bias={"1234": 100}, max_tokens=4, **ASK)
    assert biased.choices[0].message.content
    eos = await client.chat.completions.create(
        model="tiny", max_tokens=20, logit_bias={"2": 100}, extra_body={"min_tokens": 5}, **ASK
    )
    assert eos.usage.completion_tokens >= 5

    for fields, param in (
        ({"response_format": schema({"type": "nonsense"})}, "response_format"),
        ({"extra_body": {"regex": "(foo"}}, "regex"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ):
        for model in ("tiny", "reference"):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=model, max_tokens=4, **ASK, **fields)
            assert refused.value.param == param
    still = await client.chat.completions.create(model="tiny", max_tokens=4, **ASK)
    assert still.usage.completion_tokens == 4


def schema(of: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": json.loads(json.dumps(of))}}
