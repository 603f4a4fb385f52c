"""Framing of every kind of stream, for any text however it is cut: what a client joins is what was generated."""

import asyncio
import json
from typing import Any

import pytest
from gateway_rig import HELLO, Rig, eventually
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import Interrupted
from contracts.lifecycle import FinishReason, HandOff, Path, Phase
from contracts.rating import Price, Tokens
from contracts.units import Nano, NanoPerMillion
from contracts.usage import Outcome, UsageEvent
from gateway.completions import CompletionStream
from gateway.messages import PING as ANTHROPIC_PING
from gateway.messages import MessageStream
from gateway.outputs import EventStream
from gateway.response_book import Kept
from gateway.responses import Keeper, ResponseStream
from gateway.schemas.answers import Telling
from gateway.schemas.response_objects import Response
from gateway.sse import ChunkTemplate
from gateway.writer import PING, PING_S, EventWriter

KINDS = ("chat", "completion", "message", "response")
SEPARATORS = '\n\r\u2028\u2029\x00\x1e data:[DONE]"\\é☃𝄞👩‍👩‍👧'
text = st.text(st.one_of(st.sampled_from(SEPARATORS), st.characters(exclude_categories=("Cs",))), max_size=12)


def event() -> UsageEvent:
    nothing = NanoPerMillion(0)
    price = Price(version=1, model="m", prefill_computed=nothing, prefill_cached=nothing, decode=nothing)
    return UsageEvent(
        rid="r",
        org="o",
        project="p",
        key_id="k",
        model="m",
        pool="m",
        tier="default",
        outcome=Outcome.FINISHED,
        tokens=Tokens(prefill_computed=3, decode=2),
        price=price,
        cost=Nano(0),
        path=Path.PD,
        hand_off=HandOff.DIRECT,
    )


def stream_of(kind: str, loop: asyncio.AbstractEventLoop, *, with_usage: bool = False) -> Any:
    writer = EventWriter(loop, ping=ANTHROPIC_PING if kind == "message" else PING)
    match kind:
        case "chat":
            template = ChunkTemplate(chunk_id="c", created_s=1, model="m", num_samples=1, with_usage=with_usage)
            return EventStream(writer, template, num_samples=1, with_usage=with_usage, telling=Telling("EUR"))
        case "completion":
            head = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
            return CompletionStream(writer, head, echoed=[""], with_usage=with_usage, telling=Telling("EUR"))
        case "message":
            return MessageStream(writer, message_id="m", model="m", prompt_tokens=3, telling=Telling("EUR"))
        case _:
            response = Response(id="resp_1", created_at=1, model="m", status="in_progress")
            kept = Kept(org="o", gateway_id="g", response=response, input_items=[], conversation=[])
            return ResponseStream(writer, Keeper(None, kept, telling=Telling("EUR")), rid="r")


def frames(raw: bytes) -> list[str]:
    """Split as a client does that knows nothing but the specification of server-sent events."""
    assert raw.endswith(b"\n\n")
    return raw.decode().removesuffix("\n\n").split("\n\n")


def data_of(frame: str) -> Any:
    (data,) = [line.removeprefix("data: ") for line in frame.split("\n") if line.startswith("data: ")]
    return data if data == "[DONE]" else json.loads(data)


def text_in(kind: str, data: Any) -> str:
    match kind:
        case "chat":
            return "".join(choice["delta"].get("content") or "" for choice in data["choices"])
        case "completion":
            return "".join(choice["text"] for choice in data["choices"])
        case "message":
            return data["delta"]["text"] if data["type"] == "content_block_delta" else ""
        case _:
            return data["delta"] if data["type"] == "response.output_text.delta" else ""


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=st.lists(text, max_size=8))
def test_what_a_client_joins_is_what_was_generated(kind: str, pieces: list[str]):
    loop = asyncio.new_event_loop()
    try:
        stream = stream_of(kind, loop, with_usage=True)
        for piece in pieces:
            stream.piece(0, piece)
        stream.sample_finished(0, FinishReason.STOP)
        stream.succeeded(event())
        told = [data_of(frame) for frame in frames(b"".join(stream.writer.pending))]
    finally:
        loop.close()
    is_openai_chunked = kind in ("chat", "completion")
    assert (told[-1] == "[DONE]") is is_openai_chunked
    chunks = [data for data in told if data != "[DONE]"]
    assert len(told) - len(chunks) == (1 if is_openai_chunked else 0)
    assert "".join(text_in(kind, data) for data in chunks) == "".join(pieces)
    if is_openai_chunked:
        assert all("choices" in data for data in chunks)  # none without: some clients index it unseen
        assert [bool(data["choices"]) for data in chunks] == [True] * (len(chunks) - 1) + [False]
        assert all(data["usage"] is None for data in chunks[:-1])
        assert chunks[-1]["usage"]["completion_tokens"] == 2
    else:
        assert all(data["type"] for data in chunks)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_without_being_asked_no_chunk_has_usage_and_none_is_without_choices(kind: str):
    loop = asyncio.new_event_loop()
    try:
        stream = stream_of(kind, loop)
        stream.piece(0, "a")
        stream.sample_finished(0, FinishReason.STOP)
        stream.succeeded(event())
        *chunks, done = [data_of(frame) for frame in frames(b"".join(stream.writer.pending))]
    finally:
        loop.close()
    assert done == "[DONE]"
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_after_the_first_byte_is_the_last_event_and_no_done_follows(kind: str):
    stream = stream_of(kind, asyncio.get_running_loop())
    stream.placed()
    await stream.writer.head()
    stream.piece(0, "a")
    stream.failed(Interrupted("broke off"))
    last = data_of(frames(b"".join(stream.writer.pending))[-1])
    match kind:
        case "message":
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        case "response":
            assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "broke off")
        case _:
            assert last["error"]["message"] == "broke off"
    assert b"[DONE]" not in b"".join(stream.writer.pending)


@pytest.mark.parametrize("kind", KINDS)
async def test_silence_is_filled_with_what_clients_of_that_kind_pass_over(kind: str):
    stream, sent = stream_of(kind, asyncio.get_running_loop()), []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["body"])

    async with asyncio.TaskGroup() as tasks:
        stream.placed()
        await stream.writer.head()
        pumping = tasks.create_task(stream.writer.pump(send))
        await asyncio.sleep(0)
        stream.tick(stream.writer._last_sent_s + PING_S)
        stream.abandoned()
        await pumping
    ping = sent[-1]
    assert ping.startswith(b"event: ping\n") if kind == "message" else ping == b": ping\n\n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**HELLO, "n": 2}),
        ("/v1/completions", {"model": "tiny", "prompt": "Hi", "n": 2}),
    ],
)
async def test_a_client_that_leaves_stops_every_sample_on_both_workers_of_a_pair(rig: Rig, path: str, body: dict):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post(path, json=body))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        prefills = [await rig.prefill.open(submit.rid, Phase.PREFILL, sample=sample) for sample in range(2)]
        decodes = [await rig.decode.open(submit.rid, Phase.DECODE, sample=sample) for sample in range(2)]
        await decodes[0].tokens("x")
        await eventually(lambda: next(iter(rig.gateway.table)).accepted)
        asked.cancel()
        for worker in (rig.prefill, rig.decode):
            await eventually(lambda worker=worker: worker.aborts)
            assert all(abort.all_samples for abort in worker.aborts)
    for handle in prefills:
        await handle.finish(FinishReason.ABORTED, prompt=3)
    for handle in decodes:
        await handle.finish(FinishReason.ABORTED, completion=1)
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.tokens.decode) == (Outcome.CLIENT_LEFT, 2)
