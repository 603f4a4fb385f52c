"""`pdgate demo`: a decode worker is killed in mid-sentence, and the text goes on, all on one machine.

A minute and a half with the timed engine; the real one also loads four times, a minute or two each on two cores.

1. A stack: the one that runs here, if it can lose a decode worker, or one of its own.
2. A story is streamed; after some text the worker that makes it gets `kill -9`; the text goes on elsewhere.
3. The same prompt again: its KV is found, and costs less.
4. A worker changes its role, by the same call as the controller's, and back.
5. The bill by phase, and what every worker counted. Then everything runs again.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from redis.asyncio import Redis
from rich.console import Console

from billing.database import create_engine
from contracts.catalog import Catalog, read_catalog
from contracts.lifecycle import Role, WorkerState
from contracts.resp import redis_client
from contracts.series import PERIOD_S, read_series
from contracts.wire import Registration
from pdgate.demo_stack import own_stack, running_stack
from pdgate.layout import catalog_file
from pdgate.preflight import CannotStart
from pdgate.roster import EngineKind
from pdgate.story import Story, story_of
from pdgate.usage import money
from pdgate.why import picture
from pdgate.worker_commands import alive_workers, order_role

_WIDTH: Final = 108
_TOKENS: Final = 160
_KILL_AFTER: Final = 50
"""Pieces of text."""
_WAIT_S: Final = 60.0
_NEXT_LIFE_S: Final = 300.0
"""A worker with a real engine starts again: on two busy cores that takes minutes."""
_PROMPT: Final = (
    "You are the keeper of a lighthouse at the end of a long pier. Ships pass, storms come and go, and every evening "
    "you write one page into the log: the weather, the lamp, the sails on the horizon, and what you thought about "
    "while the light went round. You write plainly, in whole sentences, as people do who have time. "
    "Tell the story of the night when the lamp went out and came back."
)


def demo(
    engine: Annotated[EngineKind, typer.Option(help="Of its own stack: sglang is real; timed simulates.")] = (
        EngineKind.SGLANG
    ),
    own: Annotated[bool, typer.Option("--own", help="Start a stack even if one runs here.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the screen to this file as well.")] = None,
) -> None:
    """Kill a decode worker in mid-sentence and watch the text go on; then see the KV, a flip and the bill."""
    console = Console(width=_WIDTH, highlight=False, record=True, force_terminal=None if svg is None else True)
    file = catalog_file()
    stack = None if own else running_stack()
    with contextlib.nullcontext(stack) if stack is not None else own_stack(engine) as variables:
        # A stack of its own is ready with its first pair; the second decode worker may still load.
        wait_s = _NEXT_LIFE_S if stack is None else _WAIT_S
        asyncio.run(_Demo(console, variables, read_catalog(file), wait_s=wait_s).run())
    if svg is not None:
        svg.write_text(console.export_svg(title="pdgate demo"))


class _Demo:
    """One show."""

    def __init__(self, console: Console, stack: Mapping[str, str], catalog: Catalog, *, wait_s: float) -> None:
        """`wait_s`: how long to wait for the workers at the beginning."""
        self._console = console
        self._stack = stack
        self._catalog = catalog
        self._decisions = Path(stack["PDGATE_DATA"]) / "decisions"
        self._model = next(iter(catalog.models))
        self._pool = catalog.pool_of(self._model)
        self._wait_s = wait_s
        self._column = 0

    async def run(self) -> None:
        """Show everything, then see that all workers are back."""
        headers = {"authorization": f"Bearer {self._stack['PDGATE_API_KEY']}"}
        async with (
            redis_client(self._stack["REDIS_URL"]) as redis,
            httpx.AsyncClient(
                base_url=self._stack["PDGATE_URL"], headers=headers, timeout=120, trust_env=False
            ) as http,
        ):
            before = await self._workers(redis, "two decode workers", _two_ways, within_s=self._wait_s)
            self._say("1", f"{_count(before)}; a story from {self._model}:")
            rid = await self._story(http, redis)
            again = await self._again(http)
            await self._flip(redis, before)
            await self._bill(redis, rid, again)
            self._say("5", "Everything runs again: " + _count(await self._workers(redis, "all workers", _like(before))))

    # -- the parts ---------------------------------------------------------------------------------

    async def _story(self, http: httpx.AsyncClient, redis: Redis) -> str:
        last_s, gap_s, killed, pieces, finish, rid = time.monotonic(), 0.0, False, 0, "", ""
        async for rid, delta, reason in self._stream(http):
            now_s = time.monotonic()
            gap_s, last_s = max(gap_s, now_s - last_s) if killed else 0.0, now_s
            self._write(delta)
            pieces += bool(delta)
            finish = reason or finish
            if pieces == _KILL_AFTER and not killed:
                victim = await self._decoder(http, redis, rid)
                os.kill(victim.pid, signal.SIGKILL)
                killed, last_s = True, time.monotonic()
                self._mark(f" [kill -9 {victim.pid}: {victim.worker_id}] ")
        self._console.print()
        if not finish:
            raise CannotStart("the story broke off without a word")
        self._note(f"finish reason {finish}; the longest pause after the kill: {gap_s * 1000:.0f} ms")
        return rid

    async def _again(self, http: httpx.AsyncClient) -> str:
        counts: dict[str, Any] = {}
        rids = [rid async for rid, _, _ in self._stream(http, max_tokens=8, usage=counts.update)]
        cached, prompt = counts["prompt_tokens_details"]["cached_tokens"], counts["prompt_tokens"]
        self._say("2", f"The same prompt again: {cached} of its {prompt} tokens were found in the KV cache.")
        return rids[-1]

    async def _flip(self, redis: Redis, before: Sequence[Registration]) -> None:
        since_ms = int(time.time() * 1000)
        everybody = await self._workers(redis, "the killed worker's next life", _like(before))
        one = next(w for w in everybody if w.role is Role.DECODE)
        changes = []
        for role in (Role.PREFILL, Role.DECODE):
            result = await order_role(redis, self._pool, one.worker_id, role)
            if not result.ok:
                raise CannotStart(f"{one.worker_id} keeps its role: {result.message}")
            changes.append(f"{role.value} (drained in {result.drain_ms:.0f} ms, switched in {result.switch_ms:.0f} ms)")
        self._say("3", f"{one.worker_id} becomes {changes[0]}, and again {changes[1]}.")
        async with asyncio.timeout(_WAIT_S):
            while True:
                points = await read_series(redis, self._pool, since_unix_ms=since_ms)
                flips = [flip for point in points for flip in point.flips]
                if len(flips) >= 2:
                    for flip in flips:
                        self._note(f"recorded: {flip.worker_id} {flip.from_role} → {flip.to_role}, reason: {flip.why}")
                    self._note(
                        f"the controller ({points[-1].mode}) moves nobody now, reason: {points[-1].why or 'no tick'}"
                    )
                    return
                await asyncio.sleep(PERIOD_S / 10)

    async def _bill(self, redis: Redis, rid: str, again: str) -> None:
        story, cheaper = await self._posted(redis, rid), await self._posted(redis, again)
        self._say("4", "The bill by phase; the killed attempt costs nothing:")
        self._console.print(picture(story))
        first, second = _prompt_cost(story), _prompt_cost(cheaper)
        self._note(f"the prompt cost {money(first)} {story.currency}, and {money(second)} when its KV was found")

    # -- how ---------------------------------------------------------------------------------------

    async def _stream(
        self,
        http: httpx.AsyncClient,
        *,
        max_tokens: int = _TOKENS,
        usage: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> AsyncIterator[tuple[str, str, str]]:
        """Yield request id, piece of text and finish reason."""
        body = {
            "model": self._model, "stream": True, "max_tokens": max_tokens, "temperature": 0,
            "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": _PROMPT}],
        }  # fmt: skip
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise CannotStart(f"the gateway says {answer.status_code}: {(await answer.aread()).decode()[:300]}")
            rid = answer.headers["x-request-id"]
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("usage"):
                    usage(chunk["usage"])
                if chunk.get("error"):
                    raise CannotStart(f"the story broke off: {chunk['error']['message']}")
                for choice in chunk.get("choices", ()):
                    yield rid, choice["delta"].get("content") or "", choice.get("finish_reason") or ""

    async def _decoder(self, http: httpx.AsyncClient, redis: Redis, rid: str) -> Registration:
        """Return the worker that makes the text."""
        name = (await http.get(f"/v1/requests/{rid}")).json()["decode_worker"]
        return next(w for w in await alive_workers(redis, self._pool) if w.worker_id == name)

    async def _workers(
        self,
        redis: Redis,
        wanted: str,
        enough: Callable[[Sequence[Registration]], bool],
        *,
        within_s: float = _NEXT_LIFE_S,
    ) -> Sequence[Registration]:
        """Return the ready workers once there are enough."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    found = [w for w in await alive_workers(redis, self._pool) if w.state is WorkerState.READY]
                    if enough(found):
                        return found
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise CannotStart(f"the demo needs {wanted}; `pdgate demo --own` starts them") from None

    async def _posted(self, redis: Redis, rid: str) -> Story:
        """Return a request once it is billed and its workers' counts are there."""
        engine = create_engine(self._stack["DATABASE_URL"])
        try:
            async with asyncio.timeout(_WAIT_S), engine.connect() as db:
                while True:
                    story = await story_of(rid, redis=redis, db=db, catalog=self._catalog, decisions=self._decisions)
                    if story.status == "billed" and story.attempts and story.blame_from == "decision_log":
                        return story
                    await db.rollback()  # so that the next look sees what was posted meanwhile
                    await asyncio.sleep(0.2)
        finally:
            await engine.dispose()

    # -- the screen ----------------------------------------------------------------------------------

    def _say(self, number: str, text: str) -> None:
        self._console.print(f"\n[bold cyan]{number}[/bold cyan] {text}")

    def _note(self, text: str) -> None:
        self._console.print(f"  {text}", style="dim", markup=False)

    def _write(self, text: str) -> None:
        """Print a piece of the story, in lines of whole words."""
        for number, word in enumerate(text.replace("\n", " ").split(" ")):
            lead = " " if self._column and number else ""
            if self._column + len(lead) + len(word) > _WIDTH - 8:
                self._console.print()
                self._column, lead = 0, ""
            self._console.print(lead + word, end="", markup=False, soft_wrap=True)
            self._column += len(lead) + len(word)

    def _mark(self, text: str) -> None:
        if self._column + len(text) > _WIDTH - 8:
            self._console.print()
            self._column = 0
        self._console.print(text, end="", style="bold red", markup=False, soft_wrap=True)
        self._column += len(text)


def _two_ways(workers: Sequence[Registration]) -> bool:
    return sum(w.role is Role.DECODE for w in workers) >= 2 and any(w.role is Role.PREFILL for w in workers)


def _like(before: Sequence[Registration]) -> Callable[[Sequence[Registration]], bool]:
    roles = sorted((w.worker_id, w.role) for w in before)
    return lambda found: sorted((w.worker_id, w.role) for w in found) == roles


def _count(workers: Sequence[Registration]) -> str:
    named = ", ".join(f"{sum(w.role is role for w in workers)} {role.value}" for role in Role)
    simulated = "; SIMULATED TEXT" if any(w.simulated for w in workers) else ""
    return f"{named} workers ready{simulated}"


def _prompt_cost(story: Story) -> int:
    meters = story.bill.meters if story.bill is not None else ()
    return sum(meter.cost for meter in meters if meter.meter != "decode")
