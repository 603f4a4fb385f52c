"""The bytes of one event stream on their way to the client.

Who frames events appends to `pending`; `flush` sends what is there in the same call (gateway.pump), chunks of
one batch as one send. The task of the response waits for `head`, then lends its `send` to `pump` and sleeps
until the end or until the server is behind.
"""

import asyncio
import time
from typing import Final

import structlog

from contracts.errors import ServingError
from gateway.pump import Send, Suspended, begin

log = structlog.get_logger()

PING: Final = b": ping\n\n"
PING_S: Final = 10.0  # of silence; the head of the response is held no longer either
SEND_S: Final = 60.0  # a client that takes nothing for so long is gone
MAX_WAITING_BYTES: Final = 1024 * 1024  # a client that is so far behind is gone too


class EventWriter:
    """See the module's docstring. Nothing but `head` and `pump` awaits."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ping: bytes = PING,
        send_s: float = SEND_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """`ping` is what keeps a silent connection open; a client slower than the other two allow is cut off."""
        self.pending: list[bytes] = []  # always the same list: framers keep a reference
        self.spoken = False  # set by the framer with the first token
        self.first_sent_s: float | None = None  # when the first token left, on the loop's clock
        self.refusal: ServingError | None = None  # set only while the head is held
        self._loop = loop
        self._ping = ping
        self._send_s = send_s
        self._max_waiting_bytes = max_waiting_bytes
        self._num_counted = self._waiting_bytes = 0  # of `pending`, while the server is behind
        self._closed = False
        self._head_free = False
        self._head_sent = False
        self._last_sent_s = time.monotonic()
        self._send: Send | None = None
        self._suspended: Suspended | None = None
        self._sending: asyncio.Timeout | None = None
        self._left = False
        self._waiter: asyncio.Future[None] | None = None

    # -- the framer writes ----------------------------------------------------------------------------

    def release_head(self) -> None:
        """Let the head of the response go: a worker runs the request."""
        self._head_free = True
        self._wake()

    def flush(self) -> None:
        """Send what is pending, if the head is sent and the server is not behind. Once per batch and stream."""
        pending = self.pending
        if not pending:
            return
        send = self._send
        if self._left:
            pending.clear()
            return
        if send is None or self._suspended is not None:
            if send is not None:
                self._count_waiting()
            self._wake()  # the head may go now; or the response's task sends when the server has room
            return
        frame = b"".join(pending)
        pending.clear()
        self._num_counted = self._waiting_bytes = 0
        self._last_sent_s = now_s = time.monotonic()
        if self.first_sent_s is None and self.spoken:
            self.first_sent_s = now_s
        try:
            self._suspended = begin(send({"type": "http.response.body", "body": frame, "more_body": True}))
        except Exception as error:  # noqa: BLE001 - servers say so when the client is gone; others must not suffer
            self._send_failed(error)
        if self._suspended is not None:
            self._wake()

    def close(self) -> None:
        """Send the rest and let the response end."""
        self._closed = True
        self.flush()
        self._wake()

    def fail(self, error: ServingError, event: bytes) -> None:
        """End with `event`, which tells of the error, or give the error to whoever holds the head."""
        if self._head_sent:
            self.pending.append(event)
        else:
            self.refusal = error
            self.pending.clear()
        self.close()

    def leave(self) -> None:
        """Stop: nobody reads any more."""
        self._left = True
        self.pending.clear()
        self.close()

    def tick(self, now_s: float) -> None:
        """After PING_S of silence let the head of the response go or, once it is sent, send a comment."""
        if self._closed or now_s - self._last_sent_s < PING_S:
            return
        if self._head_sent:
            self.pending.append(self._ping)
            self.flush()
        else:
            self.release_head()

    # -- the response reads -------------------------------------------------------------------------------

    async def head(self) -> None:
        """Wait until the head may be sent: placed, refused, a first token, or a late `tick`. See `refusal`."""
        while not (self._head_free or self.pending or self._closed):
            await self._wait()
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
            elif self._closed and not self.pending:
                return True
            else:
                await self._wait()
        return False

    async def _finish_send(self, suspended: Suspended) -> None:
        try:
            async with asyncio.timeout(self._send_s) as self._sending:
                await suspended
        except Exception as error:  # noqa: BLE001 - as in flush
            self._send_failed(error)

    def _count_waiting(self) -> None:
        """Cut the client off when it is too far behind."""
        self._waiting_bytes += sum(map(len, self.pending[self._num_counted :]))
        self._num_counted = len(self.pending)
        if self._waiting_bytes > self._max_waiting_bytes:
            log.info("reader_too_slow", waiting_bytes=self._waiting_bytes)
            self._left = True
            self.pending.clear()
            if self._sending is not None and self._sending.when() is not None:
                self._sending.reschedule(self._loop.time())

    def _send_failed(self, error: Exception) -> None:
        log.info("send_failed", error=repr(error))
        self._left = True
        self._wake()

    async def _wait(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        await waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
