"""What clients see when a worker dies under them, with a second one there.

1. One undisturbed answer is the reference: with one prompt at temperature 0 every answer is the same.
2. Eight streams run; a quarter through, the first decoding worker gets SIGKILL.
3. Each stream ended *whole* (the reference's text), *wrong* (another text), *told* (an error status or event), or *cut*
   (the connection closed, or the end is missing). *Continued* are those of the whole ones that say so themselves.
4. Eight more requests, at once: who routes around the dead worker?
"""

import asyncio
import os
import signal
from collections import Counter

import msgspec

from benches.peers.systems import PROMPT, Running
from benches.peers.worker import MODEL
from pdgate.bench.answers import Answer
from pdgate.bench.endpoint import Dialect, Endpoint, Message, Route
from pdgate.bench.wire import WireError, target_of
from tests.processes import until

STREAMS, TOKENS, CLOCK_MS = 8, 100, 20.0
DEADLINE_S = 60.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """How answers ended, by kind."""

    under_way: dict[str, int]
    continued: int  # of those under way: went on elsewhere, as the answer's own `pdgate` object says
    afterwards: dict[str, int]


async def play(running: Running) -> Fault:
    """Kill the first decoding worker under its streams."""
    async with running.tick(CLOCK_MS) as at:
        endpoint = Endpoint(
            target_of(f"http://127.0.0.1:{at.port}"), key=at.key, model=MODEL, route=Route.CHAT, extra={}
        )
        endpoint.dialect = Dialect(exact=False, usage=True)
        reference = Answer()
        await _ask(endpoint, reference)
        expected = "".join(reference.text)
        if reference.error is not None or len(reference.event_times_s) == 0:
            raise RuntimeError(f"the undisturbed answer ended with {reference.error}: {reference.said}")
        answers = [Answer() for _ in range(STREAMS)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_ask(endpoint, answer)) for answer in answers]
            await until(lambda: all(len(a.event_times_s) >= TOKENS // 4 for a in answers), DEADLINE_S)
            victim = next(pid for name, pid in at.worker_pids.items() if "prefill" not in name)
            os.kill(victim, signal.SIGKILL)
        under_way = Counter(_kind(answer, task.result(), expected) for answer, task in zip(answers, asked, strict=True))
        later = [Answer() for _ in range(STREAMS)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_ask(endpoint, answer)) for answer in later]
        afterwards = Counter(_kind(answer, task.result(), expected) for answer, task in zip(later, asked, strict=True))
        endpoint.connections.close()
    return Fault(
        under_way=dict(under_way),
        continued=sum(answer.attempts > 1 for answer in answers),
        afterwards=dict(afterwards),
    )


async def _ask(endpoint: Endpoint, answer: Answer) -> bool:
    """Return whether the connection held until the end."""
    request = endpoint.request([Message("user", PROMPT)], TOKENS)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await endpoint.connections.send(request, answer)
    except (WireError, TimeoutError):
        return False
    return True


def _kind(answer: Answer, held: bool, expected: str) -> str:  # noqa: FBT001 - one fact about the answer
    if answer.status not in (0, 200) or (answer.error or "").startswith("stream_"):
        return "told"
    if not held or answer.error is not None:
        return "cut"
    return "whole" if "".join(answer.text) == expected else "wrong"
