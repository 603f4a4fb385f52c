"""Where an answer goes: an event stream, or one JSON body. The generation writes without awaiting."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from contracts.errors import ServingError, openai_body
from contracts.lifecycle import FinishReason
from contracts.parsing import Detail
from contracts.usage import UsageEvent
from gateway.samples import Sample, joined
from gateway.schemas.answers import Telling, served_of, usage_of
from gateway.schemas.choices import delta_of, finish_reason, logprobs_of
from gateway.sse import DONE, ChunkTemplate, encode_text, error_event
from gateway.writer import EventWriter


class Output(Protocol):
    """What a generation writes to."""

    @property
    def first_sent_s(self) -> float | None:
        """When the first token left for the client, on the loop's clock."""
        ...

    def placed(self) -> None:
        """Take notice that a worker runs the request."""
        ...

    def piece(self, sample: int, text: str) -> None:
        """Write the text of one chunk."""
        ...

    def detailed(self, sample: int, text: str, detail: Detail) -> None:
        """Write a chunk that is more than text: reasoning, tool calls, log probabilities."""
        ...

    def flush(self) -> None:
        """Send what was written since the last flush. Called once per batch."""
        ...

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:
        """Write the end of one sample; `matched_stop` is the stop string that ended it, if one did."""
        ...

    def succeeded(self, event: UsageEvent) -> None:
        """Write the end of the answer; the numbers are final."""
        ...

    def failed(self, error: ServingError) -> None:
        """Write that the answer breaks off."""
        ...

    def abandoned(self) -> None:
        """Stop: nobody reads any more."""
        ...

    def tick(self, now_s: float) -> None:
        """Keep a silent connection open. Called about once a second."""
        ...


class Nowhere:
    """Takes what workers still make of an answer that has ended."""

    first_sent_s: float | None = None

    def placed(self) -> None:
        """Nobody waits."""

    def piece(self, sample: int, text: str) -> None:
        """Drop it."""

    def detailed(self, sample: int, text: str, detail: Detail) -> None:
        """Drop it."""

    def flush(self) -> None:
        """Nothing is there to send."""

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:
        """Drop it."""

    def succeeded(self, event: UsageEvent) -> None:
        """Nobody waits."""

    def failed(self, error: ServingError) -> None:
        """Nobody waits."""

    def abandoned(self) -> None:
        """Nobody waits."""

    def tick(self, now_s: float) -> None:
        """No connection is to be kept open."""


class EventStream:
    """A chat completion as server-sent events, framed for a writer."""

    def __init__(
        self,
        writer: EventWriter,
        template: ChunkTemplate,
        *,
        num_samples: int,
        with_usage: bool,
        telling: Telling,
    ) -> None:
        self.writer = writer
        self._pending = writer.pending
        self._template = template
        self._prefix = list(template.first_prefix)  # per sample; the role goes with the first chunk
        self._suffix = template.text_suffix
        self._spoken = [False] * num_samples
        self._calls = [0] * num_samples
        self._with_usage = with_usage
        self._telling = telling

    @property
    def first_sent_s(self) -> float | None:
        """When the first token left for the client, on the loop's clock."""
        return self.writer.first_sent_s

    def placed(self) -> None:
        """Release the head of the response."""
        self.writer.release_head()

    def piece(self, sample: int, text: str) -> None:
        """Append one chunk; `flush` sends it. The hot path: once per token."""
        if self._spoken[sample]:
            if text:
                pending = self._pending
                pending.append(self._prefix[sample])
                pending.append(encode_text(text))
                pending.append(self._suffix)
            return
        self._pending += (self._prefix[sample], encode_text(text), self._suffix)
        self._prefix[sample] = self._template.text_prefix[sample]
        self._spoken[sample] = self.writer.spoken = True

    def detailed(self, sample: int, text: str, detail: Detail) -> None:
        """Append a chunk that is more than text, each tool call in a chunk of its own as OpenAI does."""
        calls = joined(detail.tool_calls)
        self._calls[sample] += len(calls)
        rest = logprobs_of(detail.logprobs)
        first = not self._spoken[sample]
        if detail.reasoning or text or not calls:
            delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {}
            if detail.reasoning:
                delta["reasoning_content"] = detail.reasoning
            if text:
                delta["content"] = text
            if delta or rest:
                self._pending.append(self._template.detailed(sample, delta, rest))
            first, rest = False, None
        for call in calls:
            delta = {"role": "assistant", "content": None} if first else {}
            self._pending.append(self._template.detailed(sample, delta | {"tool_calls": [delta_of(call)]}, rest))
            first, rest = False, None
        self._prefix[sample] = self._template.text_prefix[sample]
        self._spoken[sample] = self.writer.spoken = True

    def flush(self) -> None:
        """Send what is pending."""
        self.writer.flush()

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:  # noqa: ARG002 - not told here
        """Append the chunk with the finish reason; `flush` sends it."""
        if not self._spoken[sample]:
            self.piece(sample, "")
        self._pending.append(self._template.finish(sample, finish_reason(reason, self._calls[sample])))

    def succeeded(self, event: UsageEvent) -> None:
        """Send the usage, if asked for, and [DONE]."""
        if self._with_usage:
            self._pending.append(self._template.usage(usage_of(event), served_of(event, self._telling)))
        self._pending.append(DONE)
        self.writer.close()

    def failed(self, error: ServingError) -> None:
        """Send the error, or give it to whoever holds the head."""
        self.writer.fail(error, error_event(openai_body(error)))

    def abandoned(self) -> None:
        """Stop: nobody reads any more."""
        self.writer.leave()

    def tick(self, now_s: float) -> None:
        """Send a comment after a long silence."""
        self.writer.tick(now_s)


Build = Callable[[Sequence[Sample], UsageEvent], bytes]


class WholeAnswer:
    """An answer that leaves as one body, which `build` makes of the samples. Reader: `ended`, then `body`."""

    def __init__(self, build: Build, *, num_samples: int, then: Callable[["WholeAnswer"], None] | None = None) -> None:
        """`then` is called once, at the end of whatever kind."""
        self.first_sent_s: float | None = None
        self.refusal: ServingError | None = None
        self.event: UsageEvent | None = None
        self.samples = [Sample() for _ in range(num_samples)]
        self._build = build
        self._then = then
        self._ended = asyncio.Event()

    def placed(self) -> None:
        """Nothing is sent before the end."""

    def piece(self, sample: int, text: str) -> None:
        """Keep one chunk."""
        if self.first_sent_s is None:
            self.first_sent_s = time.monotonic()
        self.samples[sample].piece(text)

    def detailed(self, sample: int, text: str, detail: Detail) -> None:
        """Keep a chunk that is more than text."""
        if self.first_sent_s is None:
            self.first_sent_s = time.monotonic()
        self.samples[sample].detailed(text, detail)

    def flush(self) -> None:
        """Nothing is sent before the end."""

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:
        """Keep the finish reason."""
        self.samples[sample].finished(reason, matched_stop)

    def succeeded(self, event: UsageEvent) -> None:
        """Let the reader go on."""
        self.event = event
        self._end()

    def failed(self, error: ServingError) -> None:
        """Let the reader go on with an error."""
        self.refusal = error
        self._end()

    def abandoned(self) -> None:
        """Let the reader go on with nothing."""
        self._end()

    def tick(self, now_s: float) -> None:
        """Nothing is sent before the end."""

    def _end(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(self)
        self._ended.set()

    async def ended(self) -> None:
        """Wait for the end. The generation's deadline bounds the wait."""
        await self._ended.wait()

    def body(self, event: UsageEvent) -> bytes:
        """Return the body of a successful answer."""
        return self._build(self.samples, event)
