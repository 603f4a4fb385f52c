"""Sends a load and records what came back.

1. A step begins: the clock is the event loop's, and zero is its start.
2. Open loop: each session has an intended time. Its first text is written before that time; nothing
   that the endpoint does can delay a later session. Latencies count from the intended time, so a client or a
   connection that was late adds to them instead of hiding (coordinated omission).
3. Closed loop: so many users, each of whom sends the next session when the last one ended.
4. A later turn carries the conversation so far, with the answers as they came, `think_s` after the last one.
5. The client measures itself: how late it sent, how far its event loop lagged, how much of a core it took.
"""

import asyncio
import math
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final

from pdgate.bench.answers import Answer
from pdgate.bench.endpoint import Endpoint, Message, Route
from pdgate.bench.load import Session, Turn
from pdgate.bench.records import Client, Record, Step
from pdgate.bench.texts import Author
from pdgate.bench.wire import WireError
from pdgate.plan.workload import percentile

TICK_S: Final = 0.02
LEAST_LIMIT_MS: Final = 20.0
LIMIT_OF_TTFT: Final = 0.05
BUSY: Final = 0.95
AHEAD: Final = 64  # sessions whose text is written before they are due
LEAD_S: Final = 0.2  # for the first ones of them
NEAR_S: Final = 0.01  # nothing is written ahead so shortly before a session is due

Heard = Callable[[Record | None], None]  # a request was sent (None), or ended


class Driver:
    """Plays one step."""

    def __init__(self, endpoint: Endpoint, author: Author, *, deadline_s: float, heard: Heard = lambda _: None) -> None:
        """Args: who is asked; who writes; how long one answer may take; who is told."""
        self._endpoint = endpoint
        self._author = author
        self._deadline_s = deadline_s
        self._heard = heard
        self._records: list[Record] = []
        self._gaps_ms = array("f")
        self._lag_ms = array("f")
        self._start_s = 0.0
        self._cpu_s = 0.0

    async def open_loop(self, sessions: Iterable[Session], *, name: str, rate_rps: float | None) -> Step:
        """Send each session at its intended time, whatever became of the others."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            ticking = self._begin(tasks, LEAD_S)
            async with asyncio.TaskGroup() as sent:
                async for number, session, first in self._built(sessions):
                    at_s = session.at_s or 0.0
                    wait_s = self._start_s + at_s - loop.time()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    sent.create_task(self._session(number, session, first, intended_s=at_s))
            ticking.cancel()
        return self._end(name, rate_rps=rate_rps)

    async def _built(self, sessions: Iterable[Session]) -> AsyncIterator[tuple[int, Session, list[Message]]]:
        """Return sessions with their first messages, which are written ahead while none is due."""
        upcoming = enumerate(sessions)
        ready: deque[tuple[int, Session, list[Message]]] = deque()
        while True:
            while len(ready) < AHEAD and (not ready or (ready[0][1].at_s or 0.0) - self._now() > NEAR_S):
                number, session = next(upcoming, (0, None))
                if session is None:
                    break
                ready.append((number, session, self._message(session, session.turns[0], first=True)))
                await asyncio.sleep(0)  # answers come in between two texts
            if not ready:
                return
            yield ready.popleft()

    async def closed_loop(
        self,
        sessions: Iterator[Session],
        *,
        name: str,
        concurrency: int,
        duration_s: float | None = None,
        think_s: float = 0.0,
    ) -> Step:
        """Keep `concurrency` users busy for so long, or until the sessions end."""
        numbered = enumerate(sessions)
        end_s = duration_s if duration_s is not None else math.inf

        async def user() -> None:
            while self._now() < end_s:
                number, session = next(numbered, (0, None))
                if session is None:
                    return
                first = self._message(session, session.turns[0], first=True)
                await self._session(number, session, first, intended_s=None)

        async with asyncio.TaskGroup() as tasks:
            ticking = self._begin(tasks)
            async with asyncio.TaskGroup() as users:
                for _ in range(concurrency):
                    users.create_task(user())
            ticking.cancel()
        return self._end(name, concurrency=concurrency, think_s=think_s)

    def _begin(self, tasks: asyncio.TaskGroup, lead_s: float = 0.0) -> asyncio.Task[None]:
        self._start_s = asyncio.get_running_loop().time() + lead_s
        self._cpu_s = time.process_time()
        return tasks.create_task(self._tick())

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    async def _tick(self) -> None:
        """Record how much later than asked the event loop wakes."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lag_ms.append((loop.time() - due_s) * 1000)

    def _message(self, session: Session, turn: Turn, *, first: bool) -> list[Message]:
        """Return the messages that a turn adds."""
        pieces = (*session.system, *turn.pieces) if first else turn.pieces
        if session.system and first and self._endpoint.route is Route.CHAT:
            system = Message("system", self._author.text(session.system, template=False))
            return [system, Message("user", self._author.text(turn.pieces))]
        return [Message("user", self._author.text(pieces))]

    async def _session(self, number: int, session: Session, first: list[Message], *, intended_s: float | None) -> None:
        conversation = first
        asked = sum(piece.tokens for piece in session.system)
        for index, turn in enumerate(session.turns):
            asked += sum(piece.tokens for piece in turn.pieces)
            if index:
                conversation = [*conversation, *self._message(session, turn, first=False)]
                if session.think_s:
                    due_s = self._now() + session.think_s
                    await asyncio.sleep(session.think_s)
                    intended_s = due_s if intended_s is not None else None
                else:
                    intended_s = self._now() if intended_s is not None else None
            record, text = await self._ask(number, index, turn, conversation, asked, intended_s)
            self._records.append(record)
            self._heard(record)
            if record.error is not None:
                return  # the conversation cannot go on without this answer
            asked += turn.output_tokens
            conversation = [*conversation, Message("assistant", text)]

    async def _ask(
        self, session: int, index: int, turn: Turn, conversation: list[Message], asked: int, intended_s: float | None
    ) -> tuple[Record, str]:
        request = self._endpoint.request(conversation, turn.output_tokens)
        answer = Answer()
        error: str | None = None
        sent_s = self._now()
        self._heard(None)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._endpoint.connections.send(request, answer)
        except TimeoutError:
            error = "timeout"
        except WireError:
            error = "cut" if answer.status else "connection"
        end_s = self._now()
        times = answer.event_times_s
        gaps_ms = [(later - earlier) * 1000 for earlier, later in pairwise(times)]
        error = error or answer.error
        if error is None:
            self._gaps_ms.extend(gaps_ms)
        usage = answer.usage
        record = Record(
            session=session,
            turn=index,
            intended_s=sent_s if intended_s is None else intended_s,
            sent_s=sent_s,
            end_s=end_s,
            asked_prompt_tokens=asked,
            asked_output_tokens=turn.output_tokens,
            first_s=times[0] - self._start_s if times else None,
            last_s=times[-1] - self._start_s if times else None,
            events=len(times),
            itl_p99_ms=percentile(sorted(gaps_ms), 0.99) if gaps_ms else None,
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            output_tokens=usage.output_tokens if usage else len(times),
            counted_by_server=usage is not None,
            cost_nano=answer.cost_nano,
            path=answer.path,
            simulated=answer.simulated,
            currency=answer.currency,
            error=error,
        )
        return record, "".join(answer.text)

    def _end(
        self, name: str, *, rate_rps: float | None = None, concurrency: int | None = None, think_s: float = 0.0
    ) -> Step:
        wall_s = self._now()
        records = sorted(self._records, key=lambda record: record.intended_s)
        gaps = sorted(self._gaps_ms)
        return Step(
            name=name,
            rate_rps=rate_rps,
            concurrency=concurrency,
            think_s=think_s,
            wall_s=wall_s,
            gaps_ms={f"p{share:g}": percentile(gaps, share / 100) for share in (50, 90, 95, 99)} if gaps else {},
            client=client_of(
                records, sorted(self._lag_ms), cpu=(time.process_time() - self._cpu_s) / max(wall_s, 1e-9)
            ),
            records=records,
        )


def client_of(records: list[Record], lag_ms: list[float], *, cpu: float) -> Client:
    """Judge the client: a run in which it was itself the bottleneck says nothing about the endpoint.

    Args:
        records: of the step.
        lag_ms: of its event loop, ascending.
        cpu: share of one core that it took.
    """
    late_ms = sorted((record.sent_s - record.intended_s) * 1000 for record in records)
    ttft_ms = sorted(record.ttft_ms for record in records if record.ttft_ms is not None)
    limit_ms = max(LEAST_LIMIT_MS, LIMIT_OF_TTFT * percentile(ttft_ms, 0.5))
    late_p99_ms, lag_p99_ms = percentile(late_ms, 0.99), percentile(lag_ms, 0.99)
    reasons = []
    if late_p99_ms > limit_ms:
        reasons.append(f"1 % of the requests left {late_p99_ms:.0f} ms late or more")
    if lag_p99_ms > limit_ms:
        reasons.append(f"the client's event loop lagged {lag_p99_ms:.0f} ms")
    if cpu > BUSY:
        reasons.append(f"the client took {cpu:.0%} of a core")
    return Client(
        late_p50_ms=percentile(late_ms, 0.5),
        late_p99_ms=late_p99_ms,
        lag_p99_ms=lag_p99_ms,
        cpu=cpu,
        limit_ms=limit_ms,
        invalid_because="; ".join(reasons),
    )
