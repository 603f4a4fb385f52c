"""Keeping prompts and answers for organisations that want it, beside the path of requests.

1. `recorded` puts a `Recording` around a request's output: it passes everything on and keeps the text, up to a bound.
   Whose organisation did not ask for it has no such thing around its output, so it costs nothing there.
2. The end of the answer, of whatever kind, hands the text over to `run` without waiting; a bounded part of memory holds
   what PostgreSQL has not taken. What does not fit is dropped and counted: texts are no part of the books.
3. `run` writes, and deletes what is too old or whose consent is withdrawn.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
import structlog

from contracts.errors import ServingError
from contracts.lifecycle import FinishReason
from contracts.parsing import Detail
from contracts.usage import UsageEvent
from gateway.auth import DATABASE_ERRORS
from gateway.outputs import Output
from gateway.samples import Sample
from gateway.schemas.choices import choice_of
from gateway.terms import Terms
from gateway.text_book import SWEEP_ROWS, Text, TextBook
from observability.metrics import Instruments

log = structlog.get_logger()

CLIENT_LEFT: Final = "client_left"
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
SWEEP_S: Final = 60.0
_BATCH: Final = 64
_RETRY_S: Final = 0.5


class Recording:
    """An output that keeps the text on its way to another one."""

    def __init__(
        self, inner: Output, *, num_samples: int, max_bytes: int, done: Callable[["Recording", str], None]
    ) -> None:
        """`done` is called once, with why the answer is not whole; empty = it is."""
        self.samples = [Sample() for _ in range(num_samples)]
        self.cut = False
        self._inner = inner
        self._left_bytes = max_bytes
        self._done: Callable[[Recording, str], None] | None = done

    @property
    def first_sent_s(self) -> float | None:
        """When the first token left for the client, on the loop's clock."""
        return self._inner.first_sent_s

    def placed(self) -> None:
        """Pass it on."""
        self._inner.placed()

    def piece(self, sample: int, text: str) -> None:
        """Keep the text of one chunk and pass it on."""
        self._inner.piece(sample, text)
        if self._takes(len(text.encode())):
            self.samples[sample].piece(text)

    def detailed(self, sample: int, text: str, detail: Detail) -> None:
        """Keep text, reasoning and tool calls of one chunk and pass it on."""
        self._inner.detailed(sample, text, detail)
        if self._takes(len(text.encode()) + 4 * detail.num_chars):
            kept = Detail(reasoning=detail.reasoning, tool_calls=detail.tool_calls)
            self.samples[sample].detailed(text, kept)

    def flush(self) -> None:
        """Pass it on."""
        self._inner.flush()

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:
        """Keep how a sample ended and pass it on."""
        self._inner.sample_finished(sample, reason, matched_stop)
        self.samples[sample].finished(reason, matched_stop)

    def succeeded(self, event: UsageEvent) -> None:
        """Hand the text over."""
        self._inner.succeeded(event)
        self._end("")

    def failed(self, error: ServingError) -> None:
        """Hand over what there is."""
        self._inner.failed(error)
        self._end(error.code)

    def abandoned(self) -> None:
        """Hand over what there is: the client left."""
        self._inner.abandoned()
        self._end(CLIENT_LEFT)

    def tick(self, now_s: float) -> None:
        """Pass it on."""
        self._inner.tick(now_s)

    def _takes(self, num_bytes: int) -> bool:
        """Return whether so much more is kept; after the first piece that is too much, nothing is."""
        self._left_bytes -= num_bytes
        if self._left_bytes < 0 and self._done is not None:
            self.cut = True
        return not self.cut and self._done is not None

    def _end(self, broken: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(self, broken)


class Texts:
    """See the module's docstring. `run` until cancelled, `drain` before."""

    def __init__(
        self,
        book: TextBook,
        instruments: Instruments,
        *,
        max_text_bytes: int,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """`max_text_bytes` bounds a prompt, and an answer."""
        self._book = book
        self._instruments = instruments
        self._max_text_bytes = max_text_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[Text] = deque()
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._consents_changed = asyncio.Event()

    def recorded(self, body: bytes, terms: Sequence[Terms], outputs: Sequence[Output]) -> Sequence[Output]:
        """Return outputs that keep what `body` asked and what is answered; its prompt i writes to output i."""
        return [self._recording(body, terms[0].rid, one, output) for one, output in zip(terms, outputs, strict=True)]

    def look_again(self) -> None:
        """Delete soon: an organisation changed its mind."""
        self._consents_changed.set()

    async def run(self) -> None:
        """Write what ended, and delete what may not stay."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_all())
            tasks.create_task(self._sweep_all())

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, at most `timeout_s`; the rest is lost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("texts_lost", num=len(self._waiting))

    def _recording(self, body: bytes, asked_with: str, terms: Terms, output: Output) -> Output:
        prompt = body[: self._max_text_bytes] if terms.rid == asked_with else b""
        cut = len(body) > self._max_text_bytes

        def done(recording: Recording, broken: str) -> None:
            answers = [choice_of(i, sample) for i, sample in enumerate(recording.samples)]
            self._offer(
                Text(
                    org=terms.owner.org,
                    rid=terms.rid,
                    asked_with=asked_with,
                    prompt=prompt,
                    prompt_cut=cut,
                    answer=msgspec.json.encode(answers),
                    answer_cut=recording.cut,
                    broken=broken,
                )
            )

        return Recording(output, num_samples=terms.num_samples, max_bytes=self._max_text_bytes, done=done)

    def _offer(self, text: Text) -> None:
        if self._waiting_bytes + text.num_bytes > self._max_waiting_bytes:
            self._count("dropped", 1)
            return
        self._waiting.append(text)
        self._waiting_bytes += text.num_bytes
        self._idle.clear()
        self._news.set()

    async def _write_all(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                batch = [self._waiting[i] for i in range(min(_BATCH, len(self._waiting)))]
                try:
                    written = await self._book.add(batch)
                except (sa.exc.DataError, sa.exc.IntegrityError) as error:  # would be refused again
                    log.error("texts_refused", error=type(error).__name__)  # noqa: TRY400 - its message holds the text
                    self._done_with(batch, "dropped")
                except DATABASE_ERRORS as error:
                    log.warning("texts_wait", num=len(self._waiting), error=type(error).__name__)
                    await asyncio.sleep(_RETRY_S)
                else:
                    self._done_with(batch[:written], "written")
                    self._done_with(batch[written:], "withdrawn")
            self._idle.set()

    def _done_with(self, texts: Sequence[Text], result: str) -> None:
        for _ in texts:
            self._waiting_bytes -= self._waiting.popleft().num_bytes
        self._count(result, len(texts))

    def _count(self, result: str, num: int) -> None:
        if num:
            self._instruments.stored_texts.add(num, {"result": result})

    async def _sweep_all(self) -> None:
        while True:
            self._consents_changed.clear()
            try:
                while await self._book.sweep_across_tenants() >= SWEEP_ROWS:
                    pass
            except DATABASE_ERRORS as error:
                log.warning("texts_not_swept", error=type(error).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._consents_changed.wait()
