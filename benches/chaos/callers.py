"""Open-loop load: calls begin when a clock says so, whatever became of those before. Every byte is compared."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from workers.engines.timed_text import expected_text

PAUSE_S = 1.0
"""A pause of a stream this long, or a first token this late, counts as held up.

Undisturbed it is some 10 ms, and up to half a second on a busy machine.
"""
STUCK_S = 40.0
_TICK_S = 0.05
_LATE_S = 0.2
TOKENS = (16, 100)  # fewest and most of an answer
FILLER = (2, 90)  # times the prompt repeats a sentence of three tokens or so
TEXT = "Long ago. "


class Call:
    """One request and what its client read."""

    def __init__(self, prompt: str, max_tokens: int, expected: str) -> None:
        self.prompt, self.max_tokens, self.expected = prompt, max_tokens, expected
        self.rid = ""
        self.gateway = ""
        self.text = ""
        self.usage: dict[str, int] = {}
        self.status = 0
        self.error = ""
        self.verdict = "stuck"  # done | refused | failed | cut | stuck
        self.began_s = 0.0  # Unix, as all times here
        self.ended_s = 0.0
        self.read_s: list[float] = []

    @property
    def wrong(self) -> bool:
        """Whether a byte was read that the engine does not say, or a finished answer lacks one."""
        if self.verdict == "done":
            return self.text != self.expected or self.usage.get("completion_tokens") != self.max_tokens
        return not self.expected.startswith(self.text)

    def disturbed_until_s(self, since_s: float, stalls: "Stalls") -> float | None:
        """Return when the last trouble that this call had after a moment was over; None = it had none.

        What this client itself stood still is taken off a pause: on a busy machine it is starved too.
        """
        if self.verdict != "done":
            return self.ended_s if self.ended_s > since_s else None
        times = [max(since_s, at_s) for at_s in (self.began_s, *self.read_s)]
        late = [b for a, b in itertools.pairwise(times) if b - a - stalls.within(a, b) >= PAUSE_S]
        return max(late, default=None)


class Stalls:
    """When this process did not get on: a clock that should tick every 50 ms. `run` until cancelled."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Tick, and note each tick that came late."""
        while True:
            before_s = time.time()
            await asyncio.sleep(_TICK_S)
            if time.time() - before_s > _LATE_S:
                self._found.append((before_s, time.time()))

    def longest(self, since_s: float) -> float:
        """Return the longest standstill since a moment, seconds."""
        return max((b - a for a, b in self._found if b > since_s), default=0.0)

    def within(self, from_s: float, to_s: float) -> float:
        """Return the seconds of a span that were lost."""
        return sum(max(0.0, min(to_s, b) - max(from_s, a)) for a, b in self._found)


class Prompts:
    """Makes calls whose answers are known beforehand."""

    def __init__(self, tokenizer_file: Path, *, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def next(self) -> Call:
        """Return another call."""
        count = self._random.randint(*FILLER)
        prompt = f"Tell story {next(self._numbers)}. " + TEXT * count
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        max_tokens = self._random.randint(*TOKENS)
        return Call(prompt, max_tokens, expected_text(ids, max_tokens))


class Callers:
    """Starts calls at a rate, turn by turn at the gateways. `run` until `stop`."""

    def __init__(self, gateways: Sequence[tuple[str, str]], api_key: str, prompts: Prompts, *, rate: float) -> None:
        """`gateways`: name and URL of each."""
        self._gateways = gateways
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._prompts = prompts
        self._rate = rate
        self._stopping = asyncio.Event()
        self._pacing = random.Random(0)
        self.calls: list[Call] = []

    def stop(self) -> None:
        """Begin no more calls."""
        self._stopping.set()

    def take_ended(self) -> list[Call]:
        """Return the calls that have ended since the last look, and forget them."""
        ended = [call for call in self.calls if call.ended_s]
        self.calls = [call for call in self.calls if not call.ended_s]
        return ended

    async def run(self) -> None:
        """Begin calls until stopped, and return when all have ended, or are stuck."""
        turn = itertools.cycle(range(len(self._gateways)))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(STUCK_S, connect=2.0)
        async with (
            httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            due_s = asyncio.get_running_loop().time()
            while not self._stopping.is_set():
                call = self._prompts.next()
                self.calls.append(call)
                tasks.create_task(self._call(http, call, next(turn)))
                due_s += self._pacing.expovariate(self._rate)
                try:
                    async with asyncio.timeout_at(due_s):
                        await self._stopping.wait()
                except TimeoutError:
                    continue

    async def _call(self, http: httpx.AsyncClient, call: Call, first: int) -> None:
        call.began_s = time.time()
        try:
            async with asyncio.timeout(STUCK_S):
                for number in range(len(self._gateways)):  # a client of several addresses takes the next one
                    call.gateway, url = self._gateways[(first + number) % len(self._gateways)]
                    try:
                        await self._stream(http, url, call)
                    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                        call.verdict, call.error = "refused", repr(error)
                        continue
                    except httpx.TransportError as error:
                        call.verdict, call.error = "cut", repr(error)
                    break
        except TimeoutError:
            call.verdict = "stuck"
        call.ended_s = time.time()

    async def _stream(self, http: httpx.AsyncClient, url: str, call: Call) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": call.prompt}],
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            call.rid = answer.headers.get("x-request-id", "")
            call.status = answer.status_code
            if answer.status_code != 200:
                call.error = (await answer.aread()).decode(errors="replace")[:300]
                call.verdict = "refused"
                return
            call.verdict = "cut"  # unless it says how it ends
            async for line in answer.aiter_lines():
                self._take(call, line)

    def _take(self, call: Call, line: str) -> None:
        if line == "data: [DONE]":
            call.verdict = "done"
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if event.get("error"):
                call.error, call.verdict = json.dumps(event["error"]), "failed"
            elif event.get("usage"):
                call.usage = event["usage"]
            elif event.get("choices") and (text := event["choices"][0]["delta"].get("content")):
                call.text += text
                call.read_s.append(time.time())
