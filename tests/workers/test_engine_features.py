"""What the real SGLang can do besides plain text: under a pair it is what the unified engine does."""

import json
import re

import pytest

from contracts.lifecycle import FinishReason
from contracts.parsing import Grammar, Parsing
from tests.workers.engine_client import client_of
from tests.workers.peers import new_attempt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

GREEDY = {"temperature": 0.0, "max_tokens": 24}
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": "greet", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "part", "parameters": SCHEMA, "strict": True}},
    ]
)


async def both(client, prompt, **fields):
    """(unified answer, pair's answer) of one request."""
    unified = await client.unified(prompt, **fields)
    _, decode = await client.pair(prompt, **fields)
    return unified, decode


async def test_log_probabilities_of_the_pair_are_those_of_the_unified_engine(engines):
    async with client_of(engines) as client:
        unified, pair = await both(client, engines.prompts[1], top_logprobs=3, **GREEDY)
        bare = await client.unified(engines.prompts[1], top_logprobs=0, **GREEDY)
    assert [token.id for token in pair.logprobs] == pair.ids == unified.ids
    assert b"".join(token.token for token in pair.logprobs).decode("utf-8", "replace") == pair.text
    for one, other in zip(unified.logprobs, pair.logprobs, strict=True):
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert other.logprob <= 0
        assert [token.id for token in other.top] == [token.id for token in one.top]
        assert len(other.top) == 3
        assert other.top[0].id == other.id  # greedy: the likeliest is taken
        assert [t.logprob for t in other.top] == sorted((t.logprob for t in other.top), reverse=True)
    assert [token.top for token in bare.logprobs] == [()] * len(bare.ids)


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar("json_schema", json.dumps(SCHEMA)), lambda text: set(json.loads(text)) == {"name", "age"}),
        (Grammar("regex", "(foo|bar)[0-9]{4}-x"), lambda text: re.fullmatch("(foo|bar)[0-9]{4}-x", text)),
        (Grammar("ebnf", 'root ::= "yes " ("no" | "maybe") "!"'), lambda text: text in ("yes no!", "yes maybe!")),
        (
            Grammar(
                "structural_tag",
                json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {
                            "type": "sequence",
                            "elements": [
                                {"type": "const_string", "value": "<t>"},
                                {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 1},
                                {"type": "const_string", "value": "</t>"},
                            ],
                        },
                    }
                ),
            ),
            lambda text: json.loads(text.removeprefix("<t>").removesuffix("</t>")),
        ),
    ],
)
async def test_a_grammar_holds_and_gives_the_same_under_the_pair(engines, grammar, matches):
    async with client_of(engines) as client:
        unified, pair = await both(client, engines.prompts[1], temperature=0.0, max_tokens=80, grammar=grammar)
    assert pair.text == unified.text
    assert pair.reason is FinishReason.STOP
    assert matches(pair.text)


async def test_a_stop_string_across_tokens_is_held_back_and_not_sent(engines):
    async with client_of(engines) as client:
        whole = await client.unified(engines.prompts[1], top_logprobs=0, **GREEDY)
        pieces = [token.token.decode("utf-8", "replace") for token in whole.logprobs]
        stop = pieces[6][-2:] + pieces[7][:2]
        unified, pair = await both(client, engines.prompts[1], stop=(stop,), **GREEDY)
    assert stop in whole.text
    assert pair.text == unified.text == whole.text[: whole.text.index(stop)]
    assert pair.finished.matched_stop == stop


async def test_a_stop_string_at_any_place_ends_the_text_before_it(engines):
    async with client_of(engines) as client:
        whole = (await client.unified(engines.prompts[1], **GREEDY)).text
        stops = [whole[at : at + 4] for at in range(3, 60, 3)]
        attempts = [await client.submit_pair(engines.prompts[1], stop=(stop,), **GREEDY) for stop in stops]
        answers = [(await client.ends(attempt))[1] for attempt in attempts]
    assert [answer.text for answer in answers] == [whole[: whole.index(stop)] for stop in stops]
    assert [answer.finished.matched_stop for answer in answers] == stops


async def test_characters_of_several_bytes_are_never_cut_however_they_are_tokenised(engines):
    text = "aé€漢字🙂👩‍👩‍👧 ñ"
    forced = {"grammar": Grammar("ebnf", f"root ::= {json.dumps(text, ensure_ascii=False)}"), "top_logprobs": 0}
    async with client_of(engines) as client:
        attempts = [
            await client.submit_pair(engines.prompts[1], temperature=1.5, seed=seed, max_tokens=80, **forced)
            for seed in range(12)
        ]
        answers = [(await client.ends(attempt))[1] for attempt in attempts]
    assert [answer.text for answer in answers] == [text] * 12
    assert len({tuple(answer.ids) for answer in answers}) > 1  # cut in different ways
    for answer in answers:
        assert b"".join(token.token for token in answer.logprobs) == text.encode()


async def test_biases_and_stop_tokens_reach_the_engine(engines):
    async with client_of(engines) as client:
        whole = await client.unified(engines.prompts[1], **GREEDY)
        first = whole.ids[0]
        biased = await both(client, engines.prompts[1], logit_bias={first: -100.0}, **GREEDY)
        forced = await both(client, engines.prompts[1], logit_bias={1234: 1000.0}, **GREEDY)
        stopped = await both(client, engines.prompts[1], stop_token_ids=(whole.ids[9],), **GREEDY)
        penalised = await both(client, engines.prompts[1], frequency_penalty=0.7, presence_penalty=0.3, **GREEDY)
    for unified, pair in (biased, forced, stopped, penalised):
        assert pair.ids == unified.ids
    assert biased[1].ids[0] != first
    assert set(forced[1].ids) == {1234}
    assert stopped[1].reason is FinishReason.STOP
    assert len(stopped[1].ids) <= 10


async def test_min_tokens_keeps_the_end_away(engines):
    ends = {"logit_bias": {EOS: 1000.0}, **GREEDY}
    async with client_of(engines) as client:
        at_once = await both(client, engines.prompts[1], **ends)
        later = await both(client, engines.prompts[1], min_tokens=5, **ends)
    assert [answer.finished.counts.completion_tokens for answer in at_once] == [1, 1]
    assert [answer.finished.counts.completion_tokens for answer in later] == [6, 6]
    assert later[1].ids == later[0].ids


async def test_samples_with_one_seed_differ_and_can_be_had_again(engines):
    sampled = {"temperature": 1.0, "max_tokens": 12, "seed": 5}

    async def three(client):
        texts = []
        name = new_attempt()
        for sample in range(3):
            attempt = type(name)(name.rid, 1, sample)
            to_prefill, to_decode = client.pair_submits(engines.prompts[1], attempt, **sampled)
            await client.leaders["decode"].send(submit=to_decode)
            await client.leaders["prefill"].send(submit=to_prefill)
            texts.append((await client.ends(attempt))[1].text)
        return texts

    async with client_of(engines) as client:
        first, again = await three(client), await three(client)
        alone = await client.unified(engines.prompts[1], **sampled)
    assert first == again
    assert len(set(first)) == 3
    assert first[0] == alone.text


@pytest.mark.parametrize("choice", [{"tool_choice": "required"}, {"tool_name": "part"}])
async def test_a_forced_call_is_made_in_the_models_own_format_and_parsed(engines, choice):
    parsing = Parsing(tool_parser="hermes", tools=TOOLS, parallel_tool_calls=False, **choice)
    async with client_of(engines) as client:
        unified, pair = await both(client, engines.prompts[1], parsing=parsing, temperature=0.0, max_tokens=120)
    assert pair.ids == unified.ids
    assert pair.calls == unified.calls
    assert pair.text == unified.text == ""
    assert pair.reason is FinishReason.STOP
    [(name, arguments)] = pair.calls
    assert name == choice.get("tool_name", name)
    assert set(json.loads(arguments)) == {"name", "age"}


async def test_two_calls_may_follow_each_other(engines):
    call = '<tool_call>{"name": "greet", "arguments": {"name": "é", "age": 3}}</tool_call>'
    quoted = json.dumps(call, ensure_ascii=False)
    twice = Grammar("ebnf", f'root ::= "Hi. " {quoted} {quoted}')
    async with client_of(engines) as client:
        for parallel in (True, False):
            parsing = Parsing(tool_parser="hermes", tools=TOOLS, parallel_tool_calls=parallel)
            unified, pair = await both(
                client, engines.prompts[1], parsing=parsing, grammar=twice, temperature=0.0, max_tokens=120
            )
            assert pair.text.strip() == unified.text.strip() == "Hi."
            assert pair.calls == unified.calls == [("greet", '{"name": "é", "age": 3}')] * (2 if parallel else 1)


async def test_reasoning_is_set_apart_and_counted(engines):
    think = Grammar("ebnf", 'root ::= "<think>so it is</think>yes " [0-9] [0-9]')
    parsing = Parsing(reasoning_parser="qwen3")
    async with client_of(engines) as client:
        unified, pair = await both(
            client, engines.prompts[1], parsing=parsing, grammar=think, temperature=0.0, max_tokens=40
        )
    assert pair.reasoning == unified.reasoning == "so it is"
    assert re.fullmatch(r"yes \d\d", pair.text)
    counts = pair.finished.counts
    assert 0 < counts.reasoning_tokens < counts.completion_tokens


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"grammar": Grammar("json_schema", '{"type":"nonsense"}')}, "response_format"),
        ({"grammar": Grammar("regex", "(foo")}, "regex"),
        ({"grammar": Grammar("json_schema", '{"a":' * 70 + "1" + "}" * 70)}, "response_format"),
        ({"logit_bias": {1_000_000: 1.0}}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"min_tokens": 50, "max_tokens": 40}, "min_tokens"),
        ({"parsing": Parsing(tool_parser="none", tools=TOOLS)}, "tools"),
        ({"parsing": Parsing(tool_parser="hermes", tools="[1]")}, "tools"),
        ({"parsing": Parsing(tool_parser="hermes", tools=TOOLS, tool_name="nobody")}, "tool_choice"),
        ({"parsing": Parsing(reasoning_parser="none")}, "model"),
        ({"adapter": "none"}, "model"),
    ],
)
async def test_what_the_engine_would_fail_on_late_is_refused_by_name(engines, fields, named):
    attempt = new_attempt()
    async with client_of(engines) as client:
        leader = client.leaders["unified"]
        await leader.send(submit=client.unified_submit(engines.prompts[0], attempt=attempt, **fields))
        await leader.next_of("rejected", lambda _: True)
        rejected = leader.of("rejected")[0]
        after = await client.unified(engines.prompts[0], **GREEDY)
    assert rejected.code == "bad_request"
    assert rejected.message.startswith(f"'{named}': ")
    assert after.reason is FinishReason.LENGTH
