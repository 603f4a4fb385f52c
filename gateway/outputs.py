"""Where an answer goes: an event stream, or one JSON body.

The generation writes without awaiting. What it wrote is sent in the same call (gateway.pump), chunks of one
batch as one send; the task of the response sleeps until the end or until the server is behind.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from contracts.errors import ServingError, openai_body
from contracts.lifecycle import FinishReason
from contracts.usage import UsageEvent
from gateway.pump import Send, Suspended, begin
from gateway.schemas.answers import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    Served,
    Usage,
    served_of,
    usage_of,
)
from gateway.sse import DONE, PING, ChunkTemplate, encode_text, error_event

log = structlog.get_logger()

PING_S: Final = 10.0
SEND_S: Final = 60.0  # a client that takes nothing for so long is gone


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

    def flush(self) -> None:
        """Send what was written since the last flush. Called once per batch."""
        ...

    def sample_finished(self, sample: int, reason: FinishReason) -> None:
        """Write the end of one sample."""
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


class EventStream:
    """An answer as server-sent events.

    The response waits for `head`, then lends its `send` to `pump` until everything is sent. In between,
    whoever writes also sends: the link once per batch (`flush`), the rest at once.
    """

    def __init__(
        self,
        template: ChunkTemplate,
        *,
        num_samples: int,
        with_usage: bool,
        currency: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.first_sent_s: float | None = None
        self.refusal: ServingError | None = None  # set only while the head is held
        self._loop = loop
        self._template = template
        self._prefix = list(template.first_prefix)  # per sample; the role goes with the first chunk
        self._suffix = template.text_suffix
        self._spoken = [False] * num_samples
        self._any_spoken = False
        self._with_usage = with_usage
        self._currency = currency
        self._pending: list[bytes] = []
        self._closed = False
        self._head_free = False
        self._head_sent = False
        self._last_sent_s = time.monotonic()
        self._send: Send | None = None
        self._suspended: Suspended | None = None
        self._left = False
        self._waiter: asyncio.Future[None] | None = None

    # -- the generation writes ------------------------------------------------------------------------

    def placed(self) -> None:
        """Release the head of the response."""
        self._head_free = True
        self._wake()

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
        self._spoken[sample] = self._any_spoken = True

    def flush(self) -> None:
        """Send what is pending, if the head is sent and the server is not behind. Once per batch and stream."""
        pending = self._pending
        if not pending:
            return
        send = self._send
        if send is None or self._suspended is not None or self._left:
            self._wake()  # the head may go now; or the response's task sends when the server has room
            return
        frame = b"".join(pending)
        pending.clear()
        self._last_sent_s = now_s = time.monotonic()
        if self.first_sent_s is None and self._any_spoken:
            self.first_sent_s = now_s
        try:
            self._suspended = begin(send({"type": "http.response.body", "body": frame, "more_body": True}))
        except Exception as error:  # noqa: BLE001 - servers say so when the client is gone; others must not suffer
            self._send_failed(error)
        if self._suspended is not None:
            self._wake()

    def sample_finished(self, sample: int, reason: FinishReason) -> None:
        """Append the chunk with the finish reason; `flush` sends it."""
        if not self._spoken[sample]:
            self.piece(sample, "")
        self._pending.append(self._template.finish(sample, reason))

    def succeeded(self, event: UsageEvent) -> None:
        """Send the usage, if asked for, and [DONE]."""
        if self._with_usage:
            self._pending.append(self._template.usage(usage_of(event), served_of(event, self._currency)))
        self._pending.append(DONE)
        self._close()

    def failed(self, error: ServingError) -> None:
        """Send the error, or give it to whoever holds the head."""
        if self._head_sent:
            self._pending.append(error_event(openai_body(error)))
        else:
            self.refusal = error
            self._pending.clear()
        self._close()

    def abandoned(self) -> None:
        """Stop: nobody reads any more."""
        self._left = True
        self._pending.clear()
        self._close()

    def tick(self, now_s: float) -> None:
        """Send a comment after PING_S of silence, once the head is sent."""
        if self._head_sent and not self._closed and now_s - self._last_sent_s >= PING_S:
            self._pending.append(PING)
            self.flush()

    # -- the response reads -------------------------------------------------------------------------------

    async def head(self, timeout_s: float) -> None:
        """Wait until the head may be sent: placed, refused, a first token, or `timeout_s`. See `refusal`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._head_free or self._pending or self._closed):
                    await self._wait()
        except TimeoutError:
            pass
        if self.refusal is None:
            self._head_sent = True

    async def pump(self, send: Send) -> bool:
        """Let everything that is written be sent by `send`, and return when the last of it is.

        False: the client left, so there is nobody to end the response for.
        """
        self._send = send
        self.flush()
        while not self._left:
            if self._suspended is not None:
                await self._finish_send(self._suspended)
                self._suspended = None
                self.flush()
            elif self._closed and not self._pending:
                return True
            else:
                await self._wait()
        return False

    async def _finish_send(self, suspended: Suspended) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await suspended
        except Exception as error:  # noqa: BLE001 - as in flush
            self._send_failed(error)

    def _send_failed(self, error: Exception) -> None:
        log.info("send_failed", error=repr(error))
        self._left = True
        self._wake()

    async def _wait(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        await waiter

    def _close(self) -> None:
        self._closed = True
        self.flush()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class WholeAnswer:
    """An answer as one JSON body. Reader: `result`."""

    def __init__(
        self, *, chunk_id: str, created_s: int, model: str, num_samples: int, currency: str, now_s: Callable[[], float]
    ) -> None:
        self.first_sent_s: float | None = None
        self.refusal: ServingError | None = None
        self.event: UsageEvent | None = None
        self._chunk_id = chunk_id
        self._created_s = created_s
        self._model = model
        self._currency = currency
        self._now_s = now_s
        self._texts: list[list[str]] = [[] for _ in range(num_samples)]
        self._reasons = [""] * num_samples
        self._ended = asyncio.Event()

    def placed(self) -> None:
        """Nothing is sent before the end."""

    def piece(self, sample: int, text: str) -> None:
        """Keep one chunk."""
        if self.first_sent_s is None:
            self.first_sent_s = self._now_s()
        self._texts[sample].append(text)

    def flush(self) -> None:
        """Nothing is sent before the end."""

    def sample_finished(self, sample: int, reason: FinishReason) -> None:
        """Keep the finish reason."""
        self._reasons[sample] = reason

    def succeeded(self, event: UsageEvent) -> None:
        """Let the reader go on."""
        self.event = event
        self._ended.set()

    def failed(self, error: ServingError) -> None:
        """Let the reader go on with an error."""
        self.refusal = error
        self._ended.set()

    def abandoned(self) -> None:
        """Let the reader go on with nothing."""
        self._ended.set()

    def tick(self, now_s: float) -> None:
        """Nothing is sent before the end."""

    async def ended(self) -> None:
        """Wait for the end. The generation's deadline bounds the wait."""
        await self._ended.wait()

    def body(self, event: UsageEvent) -> ChatCompletion:
        """Return the body of a successful answer."""
        usage: Usage = usage_of(event)
        served: Served = served_of(event, self._currency)
        choices = [
            Choice(index=i, message=AssistantMessage(content="".join(texts)), finish_reason=reason)
            for i, (texts, reason) in enumerate(zip(self._texts, self._reasons, strict=True))
        ]
        return ChatCompletion(
            id=self._chunk_id,
            created=self._created_s,
            model=self._model,
            choices=choices,
            usage=usage,
            pdgate=served,
        )
