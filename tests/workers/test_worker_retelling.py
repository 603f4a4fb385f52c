"""Workers say the end of their journal again when Redis begins another life."""

import asyncio

import msgspec
import pytest
from test_worker_upkeep import record

from contracts.keys import retold
from contracts.resp import redis_client
from contracts.usage import DeliveredMark
from contracts.wire import FIELD
from pdgate.services import start_valkey
from workers.records import Journal, _line
from workers.retelling import LINES_PER_ENTRY, OLDEST_MS, RETOLD_MS, Retelling, last_minute

NOW = 1_700_000_000_000


def ended(rid, ms_ago=0):
    return _line(record(rid=rid, ended_unix_ms=NOW - ms_ago)).strip()


def mark(rid):
    return _line(DeliveredMark(delivered=rid, attempt=1, sample=0)).strip()


def test_what_is_said_again_ended_within_a_minute_before_the_last_end():
    tail = [ended("old", RETOLD_MS + 2), mark("old"), ended("new", RETOLD_MS), ended("last"), mark("new"), b'{"torn']
    assert last_minute(tail, now_ms=NOW + 3_600_000) == [tail[2], tail[3], tail[4]], "however long the power was away"
    assert last_minute(tail, now_ms=NOW + OLDEST_MS + 1) == ()
    assert last_minute([], now_ms=NOW) == ()


def test_the_end_of_a_journal_is_whole_lines_of_it_rotated_ones_too(tmp_path):
    journal = Journal(tmp_path, "w")
    lines = [b"%04d" % number for number in range(20)]
    journal.write(b"\n".join(lines[:10]) + b"\n")
    journal._rotate()
    assert journal.tail(1000) == lines[:10]
    journal.write(b"\n".join(lines[10:]) + b"\n")
    assert journal.tail(1000) == lines
    assert journal.tail(12) == lines[18:], "half a line is none"
    assert journal.tail(52) == lines[10:]
    assert journal.tail(63) == lines[8:]


@pytest.fixture
async def own_valkey(service_folder):
    folder = service_folder / "retelling"
    running = [await asyncio.to_thread(start_valkey, folder)]

    async def again():
        await asyncio.to_thread(running[-1].stop)
        running.append(await asyncio.to_thread(start_valkey, folder))

    yield running[0].url, again
    await asyncio.to_thread(running[-1].stop)


async def test_a_worker_says_it_once_in_each_life_of_redis(own_valkey, tmp_path):
    url, again = own_valkey
    journal = Journal(tmp_path, "w")
    lines = [ended(f"r{number}") for number in range(LINES_PER_ENTRY + 1)]
    journal.write(b"\n".join(lines) + b"\n")
    async with redis_client(url) as redis:
        retelling = Retelling(redis, "tiny", journal, now_ms=lambda: NOW)
        assert await retelling.look() == len(lines)
        assert await retelling.look() == 0
        await redis.delete(retold("tiny"))
        await again()
        assert await retelling.look() == len(lines)
        assert await retelling.look() == 0
        entries = await redis.xrange(retold("tiny"))
        said = [line for _, fields in entries for line in fields[FIELD.encode()].splitlines()]
        assert (len(entries), said) == (2, lines)
        assert msgspec.json.decode(said[0])["rid"] == "r0"


async def test_a_worker_without_anything_in_its_journal_says_nothing(redis, tmp_path):
    assert await Retelling(redis, "tiny", Journal(tmp_path, "w")).look() == 0
    assert not await redis.exists(retold("tiny"))
