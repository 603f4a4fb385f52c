"""OpenAI's responses: translated to a chat request, answered in that API's events and objects."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from contracts.catalog import Catalog
from contracts.errors import ServingError
from contracts.lifecycle import FinishReason
from contracts.parsing import Detail, TokenLogprob
from contracts.usage import UsageEvent
from gateway.blocks import Block, Blocks, Kind, blocks_of
from gateway.chat import Chat
from gateway.outputs import WholeAnswer
from gateway.response_book import Kept, ResponseBook
from gateway.samples import Sample
from gateway.schemas.answers import Telling, served_of
from gateway.schemas.response_objects import (
    Response,
    item_id,
    item_of,
    part_of,
    response_logprobs,
    response_of,
    usage_of_response,
)
from gateway.schemas.responses import ResponsesRequest, chat_of, decode_responses
from gateway.sse import encode_text
from gateway.starter import Arrival, Started, Starter
from gateway.writer import EventWriter

LENGTH_DETAILS = {"reason": "max_output_tokens"}


class StartedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is being made, and where it goes; nowhere in the background."""

    started: Started
    output: "ResponseStream | WholeAnswer"
    response: Response  # as it stands at the start


class Responses:
    """Starts responses."""

    def __init__(self, starter: Starter, chat: Chat, book: ResponseBook, *, catalog: Catalog, gateway_id: str) -> None:
        self._starter = starter
        self._chat = chat
        self._book = book
        self._currency = catalog.currency
        self._gateway_id = gateway_id

    async def start(self, arrival: Arrival) -> StartedResponse:
        """Admit a request and write it to the inbox. Raises one of contracts.errors."""
        asked = decode_responses(arrival.body)
        org = arrival.key.organisation_id
        history: Sequence[Any] = ()
        if asked.previous_response_id is not None:
            history = (await self._book.find(org, asked.previous_response_id)).conversation
        chat, conversation = chat_of(asked, history)
        size = len(msgspec.json.encode(conversation)) if history else None
        work = await self._chat.work(chat, arrival, body_bytes=size)
        response = response_of(
            asked, response_id=f"resp_{arrival.rid}", created_s=arrival.created_s, model=work.model.name
        )
        kept = Kept(
            org=org,
            gateway_id=self._gateway_id,
            response=response,
            input_items=_input_items(asked),
            conversation=conversation,
        )
        keeper = Keeper(
            self._book if asked.keeps else None, kept, telling=Telling(self._currency, arrival.sees_workers)
        )
        output: ResponseStream | WholeAnswer
        if asked.stream:
            output = ResponseStream(EventWriter(asyncio.get_running_loop()), keeper, rid=arrival.rid)
        else:
            output = WholeAnswer(
                lambda samples, event: msgspec.json.encode(keeper.whole(samples[0], event, arrival.rid)),
                num_samples=1,
                then=lambda answer: keeper.ended(answer, arrival.rid),
            )
        keeper.begun(shown=bool(asked.stream or asked.background))
        try:
            started = await self._starter.start(arrival, work, [output])
        except BaseException:
            keeper.refused()
            raise
        if asked.keeps:
            self._book.cancellable(response.id, started.client_left)
        return StartedResponse(started=started, output=output, response=response)


class Keeper:
    """Makes the final response, and has it kept if the client wants that."""

    def __init__(self, book: ResponseBook | None, kept: Kept, *, telling: Telling) -> None:
        self.response = kept.response
        self._book = book
        self._kept = kept
        self._telling = telling

    def begun(self, *, shown: bool) -> None:
        """Keep the response as it starts; `shown`: the client learns its id now."""
        if self._book is not None:
            self._book.begun(self._kept, shown=shown)

    def refused(self) -> None:
        """Drop it: it was not admitted."""
        if self._book is not None:
            self._book.forget(self.response.id)

    def whole(self, sample: Sample, event: UsageEvent, rid: str) -> Response:
        """Return the response of an answer that was not streamed."""
        return self.completed(blocks_of(sample), sample.reason, event, rid)

    def completed(self, blocks: Sequence[Block], reason: FinishReason | None, event: UsageEvent, rid: str) -> Response:
        """Return the response of a whole answer."""
        cut = reason is FinishReason.LENGTH
        last = len(blocks) - 1
        return msgspec.structs.replace(
            self.response,
            status="incomplete" if cut else "completed",
            incomplete_details=LENGTH_DETAILS if cut else None,
            output=[
                item_of(block, rid, status="incomplete" if cut and i == last else "completed")
                for i, block in enumerate(blocks)
            ],
            usage=usage_of_response(event),
            completed_at=None if cut else int(time.time()),
            pdgate=served_of(event, self._telling),
        )

    def ended(self, answer: WholeAnswer, rid: str) -> None:
        """Keep how an answer that was not streamed ended."""
        if answer.event is not None:
            self.keep(self.whole(answer.samples[0], answer.event, rid), blocks_of(answer.samples[0]))
        else:
            self.keep(self.broken(answer.refusal), ())

    def broken(self, error: ServingError | None) -> Response:
        """Return the response of an answer that broke off: by `error`, or because the client wanted that."""
        if error is None:
            return msgspec.structs.replace(self.response, status="cancelled")
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        return msgspec.structs.replace(self.response, status="failed", error={"code": code, "message": error.message})

    def keep(self, response: Response, blocks: Sequence[Block]) -> None:
        """Have the final response kept, with the conversation as far as it has come."""
        if self._book is None:
            return
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(block.text for block in blocks if block.kind is Kind.TEXT),
        }
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in blocks
            if block.kind is Kind.CALL
        ]
        if calls:
            answer |= {"tool_calls": calls, "content": answer["content"] or None}
        conversation = [*self._kept.conversation, answer] if blocks else self._kept.conversation
        self._book.finished(msgspec.structs.replace(self._kept, response=response, conversation=conversation))


class ResponseStream:
    """A response as events with sequence numbers, framed for a writer."""

    def __init__(self, writer: EventWriter, keeper: Keeper, *, rid: str) -> None:
        self.writer = writer
        self._pending = writer.pending
        self._keeper = keeper
        self._rid = rid
        self._blocks = Blocks(self)
        self._begun = False
        self._sequence = 0
        self._open = b""
        self._item: dict[str, Any] = {}
        self._reason: FinishReason | None = None

    @property
    def first_sent_s(self) -> float | None:
        """When the first token left for the client, on the loop's clock."""
        return self.writer.first_sent_s

    def placed(self) -> None:
        """Begin, and release the head of the HTTP response."""
        self._begin()
        self.writer.release_head()

    def piece(self, sample: int, text: str) -> None:  # noqa: ARG002 - there is one
        """Append one chunk; `flush` sends it. The hot path: once per token."""
        if not self._begun:
            self._begin()
        self.writer.spoken = True
        if text:
            self._blocks.text(text)

    def detailed(self, sample: int, text: str, detail: Detail) -> None:  # noqa: ARG002 - there is one
        """Append a chunk that is more than text."""
        self._begin()
        self.writer.spoken = True
        self._blocks.detailed(text, detail)

    def flush(self) -> None:
        """Send what is pending."""
        self.writer.flush()

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:  # noqa: ARG002 - one, not told
        """Close the last item."""
        self._begin()
        self._reason = reason
        if not self._blocks.all:
            self._blocks.text("")  # an empty answer is an empty message
        self._blocks.end()

    def succeeded(self, event: UsageEvent) -> None:
        """Send the whole response."""
        response = self._keeper.completed(self._blocks.all, self._reason, event, self._rid)
        self._emit(f"response.{response.status}", {"response": response})
        self._keeper.keep(response, self._blocks.all)
        self.writer.close()

    def failed(self, error: ServingError) -> None:
        """Send the failed response, or give the error to whoever holds the head."""
        response = self._keeper.broken(error)
        self._keeper.keep(response, ())
        self.writer.fail(error, self._event("response.failed", {"response": response}))

    def abandoned(self) -> None:
        """Stop: nobody reads any more."""
        self._keeper.keep(self._keeper.broken(None), ())
        self.writer.leave()

    def tick(self, now_s: float) -> None:
        """Send a comment after a long silence."""
        self.writer.tick(now_s)

    # -- blocks ----------------------------------------------------------------------------------------------

    def block_opened(self, block: Block) -> None:
        """Write the beginning of an item and prepare the bytes around its pieces."""
        at = {"output_index": block.index, "item_id": item_id(block, self._rid)}
        item = item_of(block, self._rid, status="in_progress")
        self._emit("response.output_item.added", {"output_index": block.index, "item": item})
        kind = "function_call_arguments"
        if block.kind is not Kind.CALL:
            at |= {"content_index": 0}
            kind = "output_text" if block.kind is Kind.TEXT else "reasoning_text"
            self._emit("response.content_part.added", at | {"part": part_of(block, empty=True)})
        self._item = at
        name = f"response.{kind}.delta"
        fields = msgspec.json.encode({"type": name, **at})[:-1]
        self._open = b'event: %b\ndata: %b,"sequence_number":' % (name.encode(), fields)

    def block_grew(self, block: Block, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Write a piece of the open item."""
        self._pending.append(self._open)
        tail = b""
        if block.kind is Kind.TEXT:
            tail = b',"logprobs":%b' % (msgspec.json.encode(response_logprobs(logprobs)) if logprobs else b"[]")
        self._pending.append(b'%d,"delta":%b%b}\n\n' % (self._sequence, encode_text(text), tail))
        self._sequence += 1

    def block_closed(self, block: Block) -> None:
        """Write the end of an item."""
        text, at = block.text, self._item
        match block.kind:
            case Kind.TEXT:
                fields = at | {"text": text, "logprobs": response_logprobs(block.logprobs)}
                self._emit("response.output_text.done", fields)
                self._emit("response.content_part.done", at | {"part": part_of(block)})
            case Kind.REASONING:
                self._emit("response.reasoning_text.done", at | {"text": text})
                self._emit("response.content_part.done", at | {"part": part_of(block)})
            case Kind.CALL:
                self._emit("response.function_call_arguments.done", at | {"arguments": text, "name": block.name})
        status = "incomplete" if self._reason is FinishReason.LENGTH else "completed"
        item = item_of(block, self._rid, status=status)
        self._emit("response.output_item.done", {"output_index": block.index, "item": item})

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            for name in ("response.created", "response.in_progress"):
                self._emit(name, {"response": self._keeper.response})

    def _emit(self, name: str, fields: Mapping[str, Any]) -> None:
        self._pending.append(self._event(name, fields))

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def _input_items(asked: ResponsesRequest) -> list[Any]:
    """Return the input as items that can be listed."""
    if isinstance(asked.input, str):
        part = {"type": "input_text", "text": asked.input}
        return [{"id": "item_0", "type": "message", "role": "user", "content": [part], "status": "completed"}]
    listed = []
    for i, item in enumerate(asked.input):
        fields = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
        listed.append({"id": f"item_{i}", **fields})
    return listed
