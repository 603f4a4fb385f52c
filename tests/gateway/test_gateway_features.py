"""What a chat request asks the workers for, and what comes of the pieces that they send."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from gateway_rig import Rig, running_rig

from contracts.catalog import read_catalog
from contracts.lifecycle import FinishReason, Phase
from contracts.parsing import Detail, Grammar, Parsing, TokenLogprob, ToolCallDelta, detail_to_pb
from contracts.wire import pack_ids
from gateway.schemas.conversation import CalledFunction, CalledTool, Message
from gateway.schemas.plain_tools import told_of_tools

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def own_catalog(catalog_file: Path, tmp_path: Path) -> Path:
    """A model that calls tools and reasons, and an adapter of it."""
    text = catalog_file.read_text()
    parsers = 'tool_parser = "hermes"\nreasoning_parser = "qwen3"\n'
    text = text.replace("[models.tiny]\n", f"[models.tiny]\n{parsers}")
    adapter = text[text.index("[models.tiny]") :].replace("models.tiny", "models.tuned")
    adapter = adapter.replace('aliases = ["tiny-alias"]', 'pool = "tiny"\nadapter = "tuned-lora"')
    own = tmp_path / "models.toml"
    own.write_text(f"{text}\n{adapter}")
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


def client_of(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{str(rig.client.base_url).rstrip('/')}/v1", api_key=rig.secret, max_retries=0)


async def submitted(rig: Rig, **fields):
    """The inbox entry of a request, which is then broken off."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json={**ASK, **fields}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "invalid_request", "'regex': no")
    return submit, asked.result()


async def test_every_parameter_reaches_the_inbox(rig: Rig):
    submit, answer = await submitted(
        rig,
        max_tokens=20,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"7": -100, "8": 1.5},
        min_tokens=4,
        stop_token_ids=[9],
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        ignore_eos=True,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
    )
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.top_logprobs, sampling.min_tokens) == (20, 3, 4)
    assert sampling.logit_bias == {7: -100.0, 8: 1.5}
    assert (sampling.stop_token_ids, sampling.top_k, sampling.min_p) == ((9,), 5, 0.1)
    assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.1, True)
    assert sampling.grammar == Grammar("json_schema", '{"type":"object"}')
    assert submit.parsing == Parsing(reasoning_parser="qwen3")
    assert answer.status_code == 400  # and a worker's refusal comes back with the parameter that it names
    assert answer.json()["error"]["param"] == "regex"


async def test_a_forced_tool_and_an_adapter_reach_the_inbox(rig: Rig):
    named = {"type": "function", "function": {"name": "weather"}}
    submit, _ = await submitted(rig, model="tuned", tools=[TOOL], tool_choice=named, parallel_tool_calls=False)
    assert submit.adapter == "tuned"
    assert submit.pool == "tiny"
    assert submit.parsing.tool_name == "weather"
    assert submit.parsing.tool_parser == "hermes"
    assert not submit.parsing.parallel_tool_calls
    assert json.loads(submit.parsing.tools) == [TOOL]
    without, _ = await submitted(rig, tools=[TOOL], tool_choice="none")
    assert without.parsing.tools == ""


async def test_a_plain_request_asks_for_nothing_more(rig: Rig):
    submit, _ = await submitted(rig)
    assert submit.sampling.grammar is None
    assert submit.sampling.top_logprobs is None
    assert submit.adapter == ""


async def answered(rig: Rig, submit) -> None:
    """Reasoning, text with a log probability, and a call in two pieces."""
    await rig.scheduler.placed(submit, decode=rig.decode)
    decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
    probability = TokenLogprob(id=1, logprob=-0.25, token=b"Sure", top=())
    details = [
        Detail(reasoning="Hm."),
        Detail(logprobs=(probability,)),
        Detail(tool_calls=(ToolCallDelta(index=0, id="call_1", name="weather"),)),
        Detail(tool_calls=(ToolCallDelta(index=0, arguments='{"city":'), ToolCallDelta(index=0, arguments='"Ulm"}'))),
    ]
    await rig.decode.send(
        handle=[decode.handle] * 5,
        text=["", "Sure", "!", "", ""],
        num_tokens=[1] * 5,
        token_ids=pack_ids(range(5)),
        details=[detail_to_pb(entry, detail) for entry, detail in zip((0, 1, 3, 4), details, strict=True)],
    )
    await decode.finish(FinishReason.STOP, prompt=5, completion=5)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_gets_the_pieces_in_their_places(rig: Rig, stream):
    async with client_of(rig) as client, asyncio.TaskGroup() as tasks:
        if stream:

            async def ask():
                async with client.chat.completions.stream(**ASK, tools=[TOOL], logprobs=True) as events:
                    return await events.get_final_completion()
        else:

            async def ask():
                return await client.chat.completions.create(**ASK, tools=[TOOL], logprobs=True)

        asked = tasks.create_task(ask())
        await answered(rig, await rig.scheduler.submit())
    [choice] = asked.result().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure!"
    assert choice.message.reasoning_content == "Hm."
    [call] = choice.message.tool_calls
    assert (call.id, call.type) == ("call_1", "function")
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Ulm"}')
    [token] = choice.logprobs.content
    assert (token.token, token.bytes, token.logprob) == ("Sure", list(b"Sure"), -0.25)


def test_a_template_without_tools_is_told_of_them_in_the_conversation():
    history = [
        Message("user", "Weather?"),
        Message("assistant", None, tool_calls=[CalledTool("call_1", CalledFunction("weather", '{"city":"Ulm"}'))]),
        Message("tool", "mild", tool_call_id="call_1"),
    ]
    told = told_of_tools(history, [TOOL])
    assert [message.role for message in told] == ["system", "user", "assistant", "user"]
    assert '{"type":"function","function":{"name":"weather"' in told[0].content
    assert told[2].content == '<tool_call>\n{"name": "weather", "arguments": {"city":"Ulm"}}\n</tool_call>'
    assert told[3].content == "<tool_response>\nmild\n</tool_response>"
    with_system = told_of_tools([Message("system", "Be brief."), *history], [TOOL])
    assert with_system[0].content.startswith("Be brief.\n\n# Tools")
    assert len(with_system) == 4
    assert told_of_tools([Message("user", "Hi")], []) == [Message("user", "Hi")]


async def test_tools_are_part_of_the_prompt(rig: Rig):
    plain, _ = await submitted(rig)
    with_tools, _ = await submitted(rig, tools=[TOOL])
    without, _ = await submitted(rig, tools=[TOOL], tool_choice="none")
    assert len(with_tools.prompt) > len(plain.prompt) == len(without.prompt)
