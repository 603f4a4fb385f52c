"""What the timed engine says besides text: the same under a pair as alone, or refused by name."""

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.lifecycle import FinishReason, Phase, Role
from contracts.parsing import Grammar, Parsing
from contracts.wire import Attempt
from tests.workers.peers import Gateway, Leader, new_attempt, running_worker, submit_of, timed_pair
from workers.engines.timed_details import CALL_TOKENS, REASONING_TOKENS
from workers.engines.timed_text import expected_ids, expected_text, expected_words, safe_split

PROMPT = [5, 6, 7]
TOOLS = json.dumps([{"type": "function", "function": {"name": name}} for name in ("first", "second")])


async def answered(prompt=PROMPT, **fields):
    """The pair's answer."""
    async with timed_pair() as pair:
        attempt = await pair.submit(prompt, **fields)
        return await pair.decode_gateway.answer(attempt, Phase.DECODE)


async def test_log_probabilities_belong_to_the_tokens_that_were_said():
    answer = await answered(top_logprobs=3, max_tokens=5)
    assert [token.id for token in answer.logprobs] == answer.ids == expected_ids(PROMPT, 5)
    assert b"".join(token.token for token in answer.logprobs).decode() == answer.text
    for token in answer.logprobs:
        assert token.top[0].id == token.id
        assert len({other.id for other in token.top}) == 3
        assert [o.logprob for o in token.top] == sorted((o.logprob for o in token.top), reverse=True)


async def test_a_plain_request_has_no_details():
    assert (await answered(max_tokens=5)).details == []


@pytest.mark.parametrize(
    ("choice", "name"), [({"tool_choice": "required"}, "first"), ({"tool_name": "second"}, "second")]
)
async def test_a_forced_call_is_made(choice, name):
    answer = await answered(parsing=Parsing(tool_parser="hermes", tools=TOOLS, **choice), max_tokens=50)
    assert answer.text == ""
    [(called, arguments)] = answer.calls
    assert called == name
    assert json.loads(arguments) == {"text": expected_text(PROMPT, CALL_TOKENS)}
    assert answer.reason is FinishReason.STOP
    assert answer.finished.counts.completion_tokens == CALL_TOKENS


async def test_a_call_that_is_cut_off_says_length():
    parsing = Parsing(tool_parser="hermes", tools=TOOLS, tool_choice="required")
    answer = await answered(parsing=parsing, max_tokens=3)
    assert answer.reason is FinishReason.LENGTH
    assert not answer.calls[0][1].endswith("}")


async def test_tools_that_are_not_forced_are_not_called():
    answer = await answered(parsing=Parsing(tool_parser="hermes", tools=TOOLS), max_tokens=5)
    assert answer.calls == []
    assert answer.text == expected_text(PROMPT, 5)


async def test_reasoning_comes_first_and_is_counted():
    answer = await answered(parsing=Parsing(reasoning_parser="qwen3"), max_tokens=10)
    assert answer.reasoning + answer.text == expected_text(PROMPT, 10)
    assert answer.reasoning == expected_text(PROMPT, REASONING_TOKENS)
    assert answer.finished.counts.reasoning_tokens == REASONING_TOKENS


async def test_samples_of_one_request_say_different_things():
    async with timed_pair() as pair:
        name = new_attempt()
        texts = []
        for sample in range(3):
            attempt = await pair.submit(PROMPT, attempt=Attempt(name.rid, 1, sample), seed=7, max_tokens=6)
            texts.append((await pair.decode_gateway.answer(attempt, Phase.DECODE)).text)
    assert texts[0] == expected_text(PROMPT, 6, seed=7)
    assert texts[1] == expected_text(PROMPT, 6, seed=8)
    assert len(set(texts)) == 3
    assert len(expected_words(PROMPT, 6)) == 6


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"grammar": Grammar("json_object")}, "response_format"),
        ({"logit_bias": {40: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (40,)}, "stop_token_ids"),
        ({"adapter": "lora"}, "model"),
    ],
)
async def test_what_needs_a_model_is_refused_by_name(fields, named):
    async with running_worker(Role.UNIFIED) as worker, asyncio.TaskGroup() as tasks:
        leader, gateway = Leader(worker.address), Gateway(worker.address)
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=worker.epoch)
        await leader.send(submit=submit_of(worker, PROMPT, **fields))
        rejected = await leader.next_of("rejected", lambda _: True)
        await gateway.detach()
        await leader.close()
    assert rejected.code == "bad_request"
    assert rejected.message.startswith(f"'{named}': ")


@given(
    st.text("ab€", max_size=12),
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_a_stop_string_is_found_and_held_back_wherever_the_text_is_cut(text, stops, cuts):
    """Against the text as a whole: what ends first ends it, and nothing of it was sent."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    sent, held, ended = "", "", False
    for begin, end in itertools.pairwise(edges):
        held += text[begin:end]
        sendable, stop = safe_split(held, tuple(stops))
        sent, held = sent + held[:sendable], held[sendable:]
        if stop is not None:
            ended = True
            break
    places = [(text.find(stop), -len(stop)) for stop in stops if stop in text]
    if not places:
        assert not ended
        assert sent + held == text
        assert not held or any(stop.startswith(held) for stop in stops)
        return
    assert ended
    first_complete = min(text.find(stop) + len(stop) for stop in stops if stop in text)
    assert not any(stop in sent for stop in stops)
    assert text.startswith(sent)
    assert len(sent) < first_complete
