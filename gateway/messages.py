"""Anthropic's messages: translated to a chat request, answered in Anthropic's events and bodies."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from contracts.catalog import Catalog
from contracts.errors import ServingError
from contracts.lifecycle import FinishReason
from contracts.parsing import Detail, TokenLogprob
from contracts.usage import UsageEvent
from contracts.wire import Sampling
from gateway.blocks import Block, Blocks, Kind
from gateway.chat import Chat
from gateway.outputs import WholeAnswer
from gateway.schemas.answers import Telling, served_of
from gateway.schemas.messages import (
    MessageUsage,
    anthropic_body,
    chat_of,
    decode_count,
    decode_messages,
    message_of,
    stop_reason_of,
    usage_of_message,
)
from gateway.sse import encode_text
from gateway.starter import Arrival, Started, Starter, Work
from gateway.writer import EventWriter

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


class StartedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is being written, and where it goes."""

    started: Started
    output: "MessageStream | WholeAnswer"


class Messages:
    """Starts messages, and counts what they would take."""

    def __init__(self, starter: Starter, chat: Chat, *, catalog: Catalog) -> None:
        self._starter = starter
        self._chat = chat
        self._currency = catalog.currency

    async def start(self, arrival: Arrival) -> StartedMessage:
        """Admit a request and write it to the inbox. Raises one of contracts.errors."""
        asked = decode_messages(arrival.body)
        work = await self._chat.work(chat_of(asked), arrival)
        if asked.top_k:
            work = msgspec.structs.replace(work, sampling=_with_top_k(work, asked.top_k))
        output = self._output(arrival, work)
        started = await self._starter.start(arrival, work, [output])
        headers = started.headers | {"request-id": arrival.rid}  # where Anthropic's clients look
        return StartedMessage(started=msgspec.structs.replace(started, headers=headers), output=output)

    async def count(self, arrival: Arrival) -> int:
        """Return the tokens of a prompt. Raises one of contracts.errors."""
        return len(await self._chat.encode(chat_of(decode_count(arrival.body)), body_bytes=len(arrival.body)))

    def _output(self, arrival: Arrival, work: Work) -> "MessageStream | WholeAnswer":
        message_id, model = f"msg_{arrival.rid}", work.model.name
        telling = Telling(self._currency, arrival.sees_workers)
        if work.stream:
            return MessageStream(
                EventWriter(asyncio.get_running_loop(), ping=PING),
                message_id=message_id,
                model=model,
                prompt_tokens=len(work.prompts[0]),
                telling=telling,
            )
        return WholeAnswer(
            lambda samples, event: msgspec.json.encode(
                message_of(
                    samples,
                    event,
                    message_id=message_id,
                    model=model,
                    telling=telling,
                )
            ),
            num_samples=1,
        )


def _with_top_k(work: Work, top_k: int) -> Any:
    def sampling(max_tokens: int) -> Sampling:
        return msgspec.structs.replace(work.sampling(max_tokens), top_k=top_k)

    return sampling


class MessageStream:
    """A message as Anthropic's events, framed for a writer."""

    def __init__(
        self, writer: EventWriter, *, message_id: str, model: str, prompt_tokens: int, telling: Telling
    ) -> None:
        self.writer = writer
        self._pending = writer.pending
        self._telling = telling
        self._blocks = Blocks(self)
        self._begin: bytes | None = _event(
            "message_start",
            {
                "message": {
                    "id": message_id,
                    "type": "message",
                    "role": "assistant",
                    "model": model,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": MessageUsage(input_tokens=prompt_tokens, output_tokens=0),
                }
            },
        )
        self._open = self._close = b""
        self._stop: tuple[str, str | None] = ("end_turn", None)

    @property
    def first_sent_s(self) -> float | None:
        """When the first token left for the client, on the loop's clock."""
        return self.writer.first_sent_s

    def placed(self) -> None:
        """Release the head of the response, and begin the message."""
        self._start()
        self.writer.release_head()

    def piece(self, sample: int, text: str) -> None:  # noqa: ARG002 - there is one
        """Append one chunk; `flush` sends it. The hot path: once per token."""
        self._start()
        self.writer.spoken = True
        if text:
            self._blocks.text(text)

    def detailed(self, sample: int, text: str, detail: Detail) -> None:  # noqa: ARG002 - there is one
        """Append a chunk that is more than text."""
        self._start()
        self.writer.spoken = True
        self._blocks.detailed(text, detail)

    def flush(self) -> None:
        """Send what is pending."""
        self.writer.flush()

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:  # noqa: ARG002 - there is one
        """Close the last block."""
        self._start()
        self._blocks.end()
        self._stop = stop_reason_of(reason, matched_stop, self._blocks.num_calls)

    def succeeded(self, event: UsageEvent) -> None:
        """Send how it ended, with the final counts."""
        delta = {"stop_reason": self._stop[0], "stop_sequence": self._stop[1]}
        fields = {"delta": delta, "usage": usage_of_message(event), "pdgate": served_of(event, self._telling)}
        self._pending.append(_event("message_delta", fields))
        self._pending.append(_event("message_stop", {}))
        self.writer.close()

    def failed(self, error: ServingError) -> None:
        """Send the error, or give it to whoever holds the head."""
        self.writer.fail(error, b"event: error\ndata: %b\n\n" % msgspec.json.encode(anthropic_body(error)))

    def abandoned(self) -> None:
        """Stop: nobody reads any more."""
        self.writer.leave()

    def tick(self, now_s: float) -> None:
        """Send a ping after a long silence."""
        self.writer.tick(now_s)

    # -- blocks ----------------------------------------------------------------------------------------------

    def block_opened(self, block: Block) -> None:
        """Write the beginning of a block and prepare the bytes around its pieces."""
        match block.kind:
            case Kind.TEXT:
                content: dict[str, Any] = {"type": "text", "text": ""}
                delta = b'"text_delta","text":'
            case Kind.REASONING:
                content = {"type": "thinking", "thinking": "", "signature": ""}
                delta = b'"thinking_delta","thinking":'
            case Kind.CALL:
                content = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
                delta = b'"input_json_delta","partial_json":'
        self._pending.append(_event("content_block_start", {"index": block.index, "content_block": content}))
        self._open = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":' % block.index
            + delta
        )

    def block_grew(self, block: Block, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:  # noqa: ARG002 - none here
        """Write a piece of the open block."""
        pending = self._pending
        pending.append(self._open)
        pending.append(encode_text(text))
        pending.append(b"}}\n\n")

    def block_closed(self, block: Block) -> None:
        """Write the end of a block."""
        self._pending.append(_event("content_block_stop", {"index": block.index}))

    def _start(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._pending.append(begin)
            self._pending.append(PING)


def _event(name: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
