"""kill -9 of real SGLang workers under streams: what clients read is what one undisturbed unified engine says.

1. A unified worker is alone in the pool and answers every question: the texts to compare with.
2. A prefill and a decode worker join; the same questions go through the pair. The unified worker is left as the spare.
3. The decode worker is killed in the middle of the answers, and then the prefill worker. Under the direct hand-off the
   decode worker is started again between the two; under the store any worker does the work of those that are gone, and
   finds the prompts that they computed.

The control: a pair whose hand-off arrives empty says something else.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx
import pytest
import structlog
from redis.asyncio import Redis

from contracts.lifecycle import HandOff
from pdgate.libibverbs import library_environment
from tests.e2e.ledger_view import ledger_is_balanced, meters_of, nothing_is_reserved, requests
from tests.engines import BOOT_S, tiny_model
from tests.processes import Stack, engine_python, until
from workers.engines.sglang_store import PAGE_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(840)]

log = structlog.get_logger()

NUM_TOKENS = 800
STORIES = tuple(f"Tell story {number}. " + "Once upon a time, near the sea, there lived " * 8 for number in range(6))
SPARE, PREFILL, DECODE = "unified-0", "prefill-0", "decode-0"

# A prompt is so dear, by this catalogue, that none is short enough to be better off on the unified worker.
CATALOG = """
[models.tiny]
hand_off = "HAND_OFF"
tokenizer = "tiny"
context_tokens = 2048
default_max_tokens = 256
[models.tiny.latency]
kv_capacity_tokens = 16000
[models.tiny.latency.prefill]
fixed_ms = 5
per_token_ms = 40
[models.tiny.latency.decode]
fixed_ms = 10
per_request_ms = 1
per_kv_token_ms = 0.001
[models.tiny.latency.transfer]
fixed_ms = 5
bytes_per_ms = 100000
kv_bytes_per_token = 2048
[models.tiny.price]
prefill_computed = "0.10"
prefill_cached = "0.02"
decode = "0.40"
[models.tiny.tiers.default]
ttft_ms = 60000
tpot_ms = 100
"""


class Stream:
    """One client, and what it has read."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.rid = self.text = ""
        self.usage: dict = {}
        self.pdgate: dict = {}
        self.num_read = 0
        self.done = False

    async def run(self, http: httpx.AsyncClient) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": self.question}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            self.rid = answer.headers.get("x-request-id", "")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, event: dict) -> None:
        assert "error" not in event, event
        if event.get("usage"):
            self.usage, self.pdgate = event["usage"], event["pdgate"]
        elif event.get("choices"):
            self.text += event["choices"][0]["delta"].get("content") or ""
            self.num_read += 1


class Pool:
    """The stack, and the texts that the unified engine alone gave."""

    def __init__(self, stack: Stack, faults: Path, hand_off: HandOff) -> None:
        self.stack, self.faults, self.hand_off = stack, faults, hand_off
        self.alone: dict[str, str] = {}

    async def counted(self, name: str, label: str = "") -> float:
        """Return the sum of a metric of the scheduler, over the series that have the label."""
        async with httpx.AsyncClient(timeout=10) as client:
            page = (await client.get(f"http://127.0.0.1:{self.stack.metrics_ports['scheduler']}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith(name + "{") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def whole(self) -> None:
        """Wait until all workers are there, and the pair has shown that KV goes over and is used again."""

        async def ready() -> bool:
            pairs = await self.counted("pdgate_worker_pairs", 'state="open"')
            workers = await self.counted("pdgate_workers", 'state="ready"')
            if workers < 3 or (pairs < 1 and self.hand_off is HandOff.DIRECT):
                return False
            return await self.counted("pdgate_degrade_step") == 0

        for name in (PREFILL, DECODE):
            await until(lambda name=name: "worker_ready" in self.stack.log(name), BOOT_S, every_s=0.2)
        await until(ready, 120, every_s=0.2)

    async def control(self, question: str) -> None:
        """Show that the texts do depend on the KV cache that is handed over."""
        mine = self.stack.api_key
        self.faults.write_text("drop_kv")
        for _ in range(10 if self.hand_off is HandOff.STORE else 1):  # pages are written behind: one may come too soon
            # Another tenant's, since the decode worker keeps what it was given in its prefix cache.
            await self.stack.seed()
            async with self.streams([question]) as dropped:
                pass
            assert (dropped[0].pdgate["path"], dropped[0].done) == ("pd", True)
            if dropped[0].text != self.alone[question]:
                break
        self.faults.unlink()
        self.stack.api_key = mine
        assert dropped[0].text != self.alone[question]

    @asynccontextmanager
    async def streams(self, questions: Sequence[str]) -> AsyncIterator[list[Stream]]:
        """Streams of the questions, each begun when the one before it writes; left when all have ended.

        For prompts as dear as these a prefill worker takes one at a time, and the spare would get the others.
        """
        streams = [Stream(question) for question in questions]
        headers = {"Authorization": f"Bearer {self.stack.api_key}"}
        async with (
            httpx.AsyncClient(base_url=self.stack.url, headers=headers, timeout=300) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for stream in streams:
                tasks.create_task(stream.run(http))
                await until(lambda begun=stream: begun.num_read > 0, 120, every_s=0.005)
            yield streams

    async def start_again(self, name: str) -> None:
        """Start a worker that was killed, as its supervisor would, and wait for the pair."""
        (self.stack.folder / f"{name}.log").unlink()
        self.stack.start(name)
        await self.whole()


@pytest.fixture(params=list(HandOff))
async def pool(
    request: pytest.FixtureRequest, stack_folder: Path, redis_url: str, database_url: str
) -> AsyncIterator[Pool]:
    hand_off = request.param
    catalog_file, faults = stack_folder / "models.toml", stack_folder / "faults"
    catalog_file.write_text(CATALOG.replace("HAND_OFF", hand_off))
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=tiny_model().parent,
    )
    await stack.seed()
    stack.add_gateway(cpu_profile=True)
    stack.add_scheduler(cpu_profile=True, environ={"SCHEDULER_RATIO_MODE": "manual"})
    stack.add_billing()
    environ = {
        **library_environment(Path(engine_python()).parents[2] / "lib"),
        "WORKER_FAULTS_FILE": str(faults),
        "WORKER_PEER_TIMEOUT_S": "15",
    }
    if hand_off is HandOff.STORE:
        environ |= {"WORKER_HAND_OFF": "store", "WORKER_STORE_DIR": str(stack_folder / "pages")}
    for name in (SPARE, PREFILL, DECODE):
        stack.add_worker(name, role=name.partition("-")[0], engine="sglang", environ=environ)
    running = Pool(stack, faults, hand_off)
    try:
        stack.start("gateway", "scheduler", "billing", SPARE)
        await stack.ready(timeout_s=BOOT_S)
        stack.start(PREFILL, DECODE)  # they load while the unified worker answers
        async with running.streams(STORIES) as streams:
            pass
        assert [s.pdgate["path"] for s in streams] == ["unified"] * len(STORIES)
        running.alone = {s.question: s.text for s in streams}
        assert len(set(running.alone.values())) == len(STORIES)
        await stack.seed()  # another tenant: what the spare has cached of these prompts is not its
        yield running
    finally:
        stack.stop()


async def test_a_real_worker_killed_in_the_midst_of_answers_changes_no_character_of_them(
    pool: Pool, database: asyncpg.Connection, redis: Redis, record_property
):
    stack = pool.stack
    await pool.whole()
    await pool.control(STORIES[5])

    # kill -9 of the decode worker, with every answer under way in it.
    async with pool.streams(STORIES[:4]) as moved:
        await until(lambda: all(s.num_read >= 10 for s in moved), 120, every_s=0.005)
        assert not any(s.done for s in moved)
        stack.kill(DECODE)
        at_the_kill = [s.num_read for s in moved]
    served = [(s.pdgate["path"], s.pdgate["attempts"]) for s in moved]
    log.info("decode_killed", chunks_before=at_the_kill, served=served)
    assert [s.text for s in moved] == [pool.alone[s.question] for s in moved]
    assert sum(path == "fallback" and attempts == 2 for path, attempts in served) >= 2, served
    if pool.hand_off is HandOff.STORE:  # every full page of their prompts, if not of the answers, is found
        prompts = sum(s.usage["prompt_tokens"] // PAGE_TOKENS * PAGE_TOKENS for s in moved if s.pdgate["attempts"] == 2)

        async def found() -> bool:  # the scheduler may hear of an end after the client did
            return await pool.counted("pdgate_saved_prefill_tokens_total") >= prompts

        await until(found, 30)
    record_property("saved_prefill_tokens", await pool.counted("pdgate_saved_prefill_tokens_total"))
    if pool.hand_off is HandOff.DIRECT:
        await pool.start_again(DECODE)

    # kill -9 of the prefill worker: those that have their KV go on, those that begin go elsewhere.
    async with pool.streams(STORIES[:2]) as early:
        await until(lambda: all(s.num_read >= 10 for s in early), 120, every_s=0.005)
        stack.kill(PREFILL)
        async with pool.streams(STORIES[2:4]) as late:
            pass
    served = [(s.pdgate["path"], s.pdgate["attempts"]) for s in (*early, *late)]
    log.info("prefill_killed", served=served)
    for stream in (*early, *late):
        assert stream.text == pool.alone[stream.question]
    if pool.hand_off is HandOff.DIRECT:
        assert ("pd", 1) in served[:2]
    assert {s.pdgate["path"] for s in late} <= {"fallback", "unified"}
    await the_books_are_right([*moved, *early, *late], database, redis)


async def the_books_are_right(seen: Sequence[Stream], database: asyncpg.Connection, redis: Redis) -> None:
    """Check that every answer was billed once, by its counts."""
    await until(lambda: nothing_is_reserved(redis), 60)

    async def booked() -> bool:
        return {s.rid for s in seen} <= (await requests(database)).keys()

    await until(booked, 60)
    for stream in seen:
        meters = await meters_of(database, stream.rid)
        assert meters["decode"] == stream.usage["completion_tokens"] == NUM_TOKENS
        assert meters["prefill_computed"] + meters["prefill_cached"] == stream.usage["prompt_tokens"]
    assert await ledger_is_balanced(database)
