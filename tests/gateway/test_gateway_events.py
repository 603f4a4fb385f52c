"""What a stream and a whole answer make of chunks that are more than text."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from contracts.lifecycle import FinishReason
from contracts.parsing import Detail, TokenLogprob, ToolCallDelta
from gateway.outputs import EventStream
from gateway.samples import Sample
from gateway.schemas.answers import Telling
from gateway.schemas.choices import choice_of
from gateway.sse import ChunkTemplate
from gateway.writer import EventWriter

STOP = FinishReason.STOP


def call(index, arguments="", *, call_id="", name=""):
    return ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)


def token(raw: bytes, logprob=-0.5, top=()):
    return TokenLogprob(id=1, logprob=logprob, token=raw, top=top)


def streamed(chunks, *, num_samples=1, reason=STOP) -> list[dict]:
    """The events of a stream that is given (sample, text, detail) chunks."""
    loop = asyncio.new_event_loop()
    template = ChunkTemplate(chunk_id="c", created_s=1, model="m", num_samples=num_samples, with_usage=False)
    writer = EventWriter(loop)
    stream = EventStream(writer, template, num_samples=num_samples, with_usage=False, telling=Telling("EUR"))
    for sample, text, detail in chunks:
        if detail is None:
            stream.piece(sample, text)
        else:
            stream.detailed(sample, text, detail)
    for sample in range(num_samples):
        stream.sample_finished(sample, reason)
    loop.close()
    frames = b"".join(writer.pending).split(b"\n\n")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames if frame]


def whole(chunks, *, reason=STOP):
    sample = Sample()
    for _, text, detail in chunks:
        if detail is None:
            sample.piece(text)
        else:
            sample.detailed(text, detail)
    sample.finished(reason, "")
    return sample


def accumulated(events: list[dict]) -> ChatCompletion:
    """What the official client makes of a stream."""
    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    return state.get_final_completion()


TOOLS = [
    (0, "", Detail(reasoning="Let me ")),
    (0, "", Detail(reasoning="look.")),
    (0, "Sure. ", Detail()),
    (0, "", Detail(tool_calls=(call(0, call_id="call_a", name="weather"), call(0, '{"city":')))),
    (0, "", Detail(tool_calls=(call(0, ' "Paris"}'), call(1, call_id="call_b", name="time"), call(1, "{}")))),
]


def test_a_tool_call_is_named_once_and_its_arguments_join():
    events = streamed(TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [len(entries) for entries in calls] == [1, 1, 1]
    entries = [entry for group in calls for entry in group]
    assert [entry["index"] for entry in entries] == [0, 0, 1]
    assert [entry.get("id") for entry in entries] == ["call_a", None, "call_b"]
    assert [entry.get("type") for entry in entries] == ["function", None, "function"]
    assert [entry["function"].get("name") for entry in entries] == ["weather", None, "time"]
    assert "".join(entry["function"]["arguments"] for entry in entries[:2]) == '{"city": "Paris"}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": "Let me "}
    assert sum("role" in delta for delta in deltas) == 1


def test_the_official_client_puts_a_stream_of_tool_calls_together():
    message = accumulated(streamed(TOOLS)).choices[0].message
    assert message.content == "Sure. "
    assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("call_a", "weather", '{"city": "Paris"}'),
        ("call_b", "time", "{}"),
    ]


def test_a_whole_answer_says_what_the_stream_said():
    choice = choice_of(0, whole(TOOLS))
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure. "
    assert choice.message.reasoning_content == "Let me look."
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("call_a", "weather", '{"city": "Paris"}'),
        ("call_b", "time", "{}"),
    ]


def test_an_answer_of_calls_alone_has_no_content():
    chunks = [(0, "", Detail(tool_calls=(call(0, "{}", call_id="call_a", name="f"),)))]
    assert choice_of(0, whole(chunks)).message.content is None
    first = streamed(chunks)[0]["choices"][0]["delta"]
    assert first["role"] == "assistant"
    assert first["content"] is None


def test_calls_that_are_cut_off_end_with_length():
    chunks = [(0, "", Detail(tool_calls=(call(0, '{"a', call_id="call_a", name="f"),)))]
    assert streamed(chunks, reason=FinishReason.LENGTH)[-1]["choices"][0]["finish_reason"] == "length"


def test_logprobs_name_the_bytes_of_tokens_that_are_parts_of_a_character():
    euro = "€".encode()
    chunks = [
        (0, "", Detail(logprobs=(token(euro[:1], top=(token(euro[:1]), token(b"a", -2.0))),))),
        (0, "€", Detail(logprobs=(token(euro[1:]),))),
    ]
    completion = accumulated(streamed(chunks)).choices[0]
    content = completion.logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == completion.message.content == "€"
    assert content[0].token == "\ufffd"
    assert [other.bytes for other in content[0].top_logprobs] == [list(euro[:1]), [97]]
    assert [entry.logprob for entry in choice_of(0, whole(chunks)).logprobs.content] == [-0.5, -0.5]


def test_without_logprobs_there_are_none():
    assert choice_of(0, whole([(0, "a", None)])).logprobs is None
    assert all(event["choices"][0]["logprobs"] is None for event in streamed([(0, "a", None)]))


details = st.one_of(
    st.none(),
    st.builds(
        lambda reasoning, raw: Detail(reasoning=reasoning, logprobs=(token(raw),) if raw else ()),
        st.text(max_size=3),
        st.binary(max_size=2),
    ),
)


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=4), details), max_size=30))
def test_interleaved_samples_keep_their_own_text_reasoning_and_logprobs(chunks):
    events = streamed(chunks, num_samples=3)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk[0] == index]
        deltas = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        expected = choice_of(index, whole(own))
        assert "".join(d["delta"].get("content") or "" for d in deltas) == expected.message.content
        said = "".join(d["delta"].get("reasoning_content", "") for d in deltas)
        assert said == (expected.message.reasoning_content or "")
        num_logprobs = sum(len(d["logprobs"]["content"]) for d in deltas if d["logprobs"])
        assert num_logprobs == (len(expected.logprobs.content) if expected.logprobs else 0)
        assert [d["finish_reason"] for d in deltas].count("stop") == 1
        assert [d for d in deltas if "role" in d["delta"]] == deltas[:1]
