"""Final counts for billing: a Redis stream, and a bounded journal on local disk beside it."""

import asyncio
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from redis.exceptions import RedisError

from contracts.beat import beat
from contracts.keys import attempts
from contracts.resp import Command, RespConnection
from contracts.usage import AttemptRecord, DeliveredMark
from contracts.wire import FIELD, encode

log = structlog.get_logger()

R = TypeVar("R")

MAX_STREAM_LENGTH = 1_000_000  # a safeguard: billing deletes what it wrote
MAX_WAITING = 20_000
BATCH = 500
PERIOD_S = 0.2
TIMEOUT_S = 1.0  # for an answer of Redis
JOURNAL_BYTES = 16 * 2**20
JOURNAL_FILES = 4
_json = msgspec.json.Encoder()


class Journal:
    """A file of JSON lines in `folder`, rotated at 16 MiB; four are kept. What is written survives a power cut."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"attempts-{worker_id}.jsonl"

    def write(self, lines: bytes) -> None:
        """Append all lines or, when the disk does not take them, none. Blocking. Raises OSError."""
        with self._path.open("ab", buffering=0) as file:
            before = file.tell()
            left = memoryview(lines)
            try:
                while left:
                    left = left[file.write(left) :]
                os.fdatasync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(before)  # half a line would spoil the next one too
                raise
            full = file.tell() >= JOURNAL_BYTES
        if full:
            self._rotate()

    def tail(self, num_bytes: int) -> list[bytes]:
        """Return the whole lines among the last `num_bytes`, oldest first. Blocking. Raises OSError."""
        parts: list[bytes] = []
        for path in (self._path, self._path.with_suffix(".jsonl.1")):
            if num_bytes <= 0 or not path.exists():
                continue
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - num_bytes))
                part = file.read()
            parts.insert(0, part.partition(b"\n")[2] if size > num_bytes else part)
            num_bytes -= len(part)
        return [line for line in b"".join(parts).split(b"\n") if line]

    def _rotate(self) -> None:
        for age in range(JOURNAL_FILES - 2, -1, -1):
            old = self._path if age == 0 else self._path.with_suffix(f".jsonl.{age}")
            if old.exists():
                old.replace(self._path.with_suffix(f".jsonl.{age + 1}"))


class Recorder:
    """Takes records without blocking and writes them in batches; while Redis is away or the disk is full they wait.

    At most `MAX_WAITING` records wait in memory for each; older ones are dropped and counted.
    """

    def __init__(self, connection: RespConnection, pool: str, journal: Journal | None) -> None:
        """`connection` is closed with it."""
        self._connection = connection
        self._stream = attempts(pool)
        self._journal = journal
        self._to_stream: deque[AttemptRecord] = deque()
        self._to_journal: deque[AttemptRecord | DeliveredMark] = deque()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._redis_is_away = False
        self._disk_is_full = False
        self.num_dropped = 0

    def offer(self, record: AttemptRecord) -> None:
        """Take a record to write later."""
        self._put(self._to_stream, msgspec.structs.replace(record, payer="") if record.payer else record)
        if self._journal is not None:
            self._put(self._to_journal, record)

    def mark(self, mark: DeliveredMark) -> None:
        """Note in the journal that a gateway has all of an engine request."""
        if self._journal is not None:
            self._put(self._to_journal, mark)

    def _put(self, queue: deque[R], thing: R) -> None:
        queue.append(thing)
        if len(queue) > MAX_WAITING:
            queue.popleft()
            self.num_dropped += 1

    async def run(self) -> None:
        """Write what was offered, every `PERIOD_S`, until cancelled."""
        while True:
            await beat(PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Write everything that waits. Faults of disk and Redis are logged and tried again later."""
        if self._journal is not None and self._to_journal:
            await self._flush_journal(self._journal)
        try:
            while self._to_stream:
                await self._flush_batch()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            if not self._redis_is_away:
                log.warning("attempts_wait_for_redis", error=str(error), waiting=len(self._to_stream))
            self._redis_is_away = True
        else:
            self._redis_is_away = False

    def close(self) -> None:
        """Let go of the disk thread and of the connection."""
        self._disk.shutdown(wait=True)
        self._connection.close()

    async def _flush_batch(self) -> None:
        batch = [self._to_stream.popleft() for _ in range(min(BATCH, len(self._to_stream)))]
        add = ("XADD", self._stream, "MAXLEN", "~", MAX_STREAM_LENGTH, "*", FIELD)
        commands: list[Command] = [(*add, encode(record)) for record in batch]
        try:
            replies = await self._connection.call_all(commands)
        except BaseException:
            self._to_stream.extendleft(reversed(batch))
            raise
        refused = [
            (record, reply) for record, reply in zip(batch, replies, strict=True) if isinstance(reply, Exception)
        ]
        if refused:
            self._to_stream.extendleft(record for record, _ in reversed(refused))
            raise refused[0][1]

    async def _flush_journal(self, journal: Journal) -> None:
        records = list(self._to_journal)
        self._to_journal.clear()
        lines = b"".join(_line(record) for record in records)
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, journal.write, lines)
        except OSError as error:
            self._to_journal.extendleft(reversed(records))
            while len(self._to_journal) > MAX_WAITING:
                self._to_journal.popleft()
                self.num_dropped += 1
            if not self._disk_is_full:
                log.warning("journal_waits", error=str(error), waiting=len(self._to_journal))
            self._disk_is_full = True
        else:
            self._disk_is_full = False


def _line(record: AttemptRecord | DeliveredMark) -> bytes:
    return _json.encode(record) + b"\n"
