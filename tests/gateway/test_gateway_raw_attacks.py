"""What no HTTP library would send, written byte by byte: the gateway ends it, and nobody else's request is hurt."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import HELLO, Rig, eventually, running_rig

from contracts.catalog import Catalog

ANSWER_S = 10
BODY = json.dumps({**HELLO, "model": "no-such-model"}).encode()  # answered at once, with a 404
SMUGGLED = b"GET /livez?smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


async def told(rig: Rig, *parts: bytes, wait_s: float = 2.0) -> bytes:
    """Send bytes on a connection of their own; return what comes until it is closed, or for `wait_s` of silence."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.client.base_url.port)
    got = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while True:
            async with asyncio.timeout(wait_s):
                piece = await reader.read(65_536)
            if not piece:
                return got
            got += piece
    except TimeoutError:
        return got
    except (ConnectionError, BrokenPipeError):
        return got
    finally:
        writer.close()


async def all_told(rig: Rig, attacks: dict[Any, tuple[bytes, ...]]) -> dict[Any, bytes]:
    """Run attacks at the same time, each on a connection of its own."""
    async with asyncio.TaskGroup() as tasks:
        running = {name: tasks.create_task(told(rig, *parts)) for name, parts in attacks.items()}
    return {name: task.result() for name, task in running.items()}


def post(rig: Rig, *lines: bytes, path: str = "/v1/chat/completions") -> bytes:
    head = [
        f"POST {path} HTTP/1.1".encode(),
        b"host: x",
        f"authorization: Bearer {rig.secret}".encode(),
        b"content-type: application/json",
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n"


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of all answers in what came."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


CHUNKED = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
LENGTH = f"content-length: {len(BODY)}".encode()
SMUGGLING = {
    "a length and chunks": ([LENGTH, b"transfer-encoding: chunked"], b"0\r\n\r\n" + SMUGGLED),
    "chunks and a length": ([b"transfer-encoding: chunked", b"content-length: 5"], b"0\r\n\r\n" + SMUGGLED),
    "two lengths": ([LENGTH, b"content-length: 0"], BODY + SMUGGLED),
    "two lengths in one": ([LENGTH + b", 0"], BODY + SMUGGLED),
    "a signed length": ([b"content-length: +5"], b"AAAAA" + SMUGGLED),
    "a length in hexadecimal": ([b"content-length: 0x5"], b"AAAAA" + SMUGGLED),
    "a negative length": ([b"content-length: -1"], SMUGGLED),
    "a length beyond 64 bits": ([b"content-length: 99999999999999999999999"], SMUGGLED),
    "an unknown coding": ([b"transfer-encoding: xchunked"], CHUNKED + SMUGGLED),
    "chunked is not the last": ([b"transfer-encoding: chunked, identity"], CHUNKED + SMUGGLED),
    "two codings": ([b"transfer-encoding: identity", b"transfer-encoding: chunked"], CHUNKED[:-5] + b"0\r\n\r\n"),
    "a space before the colon": ([b"transfer-encoding : chunked", LENGTH], BODY + SMUGGLED),
    "a folded line": ([b"transfer-encoding:", b" chunked", LENGTH], BODY + SMUGGLED),
    "a folded value": ([b"x-one: a", b" transfer-encoding: chunked", LENGTH], BODY + SMUGGLED),
    "a vertical tab": ([b"transfer-encoding: \x0bchunked", LENGTH], BODY + SMUGGLED),
    "a null byte": ([b"x-null: a\x00b", LENGTH], BODY + SMUGGLED),
    "a bare CR": ([b"x-cr: a\rtransfer-encoding: chunked", LENGTH], BODY + SMUGGLED),
    "no name": ([b": x", LENGTH], BODY + SMUGGLED),
    "a bad chunk size": ([b"transfer-encoding: chunked"], b"zz\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
    "a chunk size beyond 64 bits": ([b"transfer-encoding: chunked"], b"f" * 17 + b"\r\nx\r\n0\r\n\r\n" + SMUGGLED),
    "a chunk extension without end": ([b"transfer-encoding: chunked"], b"5;" + b"x" * 1_000_000),
}


async def test_a_request_whose_end_is_ambiguous_carries_no_second_one(rig: Rig):
    answers = await all_told(rig, {attack: (post(rig, *lines), body) for attack, (lines, body) in SMUGGLING.items()})
    for attack, answer in answers.items():
        assert statuses(answer) in ([], [400], [404], [413], [431], [501]), (attack, answer[:500])
        assert b'"status"' not in answer, attack  # of /livez: the second request was run
    assert (await rig.client.get("/livez")).status_code == 200


async def test_two_good_requests_in_one_packet_are_two_answers(rig: Rig):
    """The control of the tests above: on a connection whose requests are clear the second one is answered."""
    answer = await told(rig, post(rig, LENGTH) + BODY + SMUGGLED, wait_s=1.0)
    assert statuses(answer) == [404, 200]


HEADS = {
    "a header of a megabyte": b"x-long: " + b"a" * 2**20,
    "twenty thousand headers": b"\r\n".join(b"x-%d: a" % number for number in range(20_000)),
    "a key of a megabyte": b"x-api-key: " + b"k" * 2**20,
    "a key that is not UTF-8": b"x-api-key: \xff\xfe",
    "a target header of 100 kB": b"x-pdgate-slo: " + b"ttft=1s," * 12_500,
    "a tier that is not UTF-8": b"x-pdgate-tier: \xc3\x28",
    "a trace that is none": b"traceparent: 00-" + b"z" * 60_000,
    "an idempotency key of 100 kB": b"idempotency-key: " + b"i" * 100_000,
    "an idempotency key that is not UTF-8": b"idempotency-key: \xff\x00\xfe".replace(b"\x00", b"\x80"),
    "an address that is none": b"x-forwarded-for: \xff, 999.1.1.1, ::::",
    "an encoding of 100 kB": b"content-encoding: " + b"gzip," * 20_000,
    "a content type that is none": b"content-type: \xff;charset=\xff",
    "an expectation": b"expect: a-miracle",
    "an upgrade": b"connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA",
}


async def test_a_hostile_head_is_refused_or_ignored(rig: Rig):
    answers = await all_told(rig, {attack: (post(rig, head, LENGTH), BODY) for attack, head in HEADS.items()})
    for attack, answer in answers.items():
        assert all(status < 500 or status == 501 for status in statuses(answer)), (attack, answer[:500])
        assert len(statuses(answer)) <= 1, attack
        assert len(answer) < 8192, attack
    assert (await rig.client.get("/livez")).status_code == 200


TARGETS = (
    b"/v1/models/../../etc/passwd",
    b"/v1/files/..%2f..%2f..%2fetc%2fpasswd/content",
    b"/v1/files/%00",
    b"/v1/files/%ff%fe",
    b"/v1/files/file-" + b"a" * 60_000,
    b"/v1/batches/%2e%2e%2f%2e%2e",
    b"/v1/batches/'%20OR%201=1--",
    b"/v1/batches/%00",
    b"/v1/requests/%00",
    b"/v1/requests/" + b"9" * 5000,
    b"/v1/responses/%00",
    b"/v1/responses/../../x",
    b"/v1/models/%00",
    b"/portal/static/../../../../etc/passwd",
    b"/portal/static/%2e%2e/%2e%2e/%2e%2e/settings.py",
    b"/portal/static/..%5c..%5csettings.py",
    b"/portal/static//etc/passwd",
    b"/portal/static/%00",
    b"/portal/static/.",
    b"/portal/static/vendor/%2e%2e%2f%2e%2e%2fpages.py",
    b"/portal//evil.example/",
    b"//evil.example/%2e%2e",
    b"/v1/organization/usage/completions?start_time=" + b"9" * 5000,
    b"/v1/organization/costs?start_time=-1e999&limit=0",
    b"/v1/organization/costs?start_time=1&page=%00&limit=99999999999999999999",
    b"/v1/files?after=%00&limit=-1",
    b"/v1/files?purpose=%ff&limit=1e9",
    b"/v1/batches?after=" + b"x" * 5000,
    b"/v1/models?%00=%ff",
    b"/admin/v1/organisations/%00",
    b"/%ff%fe",
    b"/schema/../admin",
    b"/%2e%2e/%2e%2e/etc/passwd",
    b"http://169.254.169.254/latest",
    b"*",
)


async def test_no_path_or_query_leaves_its_place_or_makes_a_server_error(rig: Rig):
    wrong = []
    end = b" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + rig.secret.encode() + b"\r\nconnection: close\r\n\r\n"
    answers = await all_told(rig, {target: (b"GET " + target + end,) for target in TARGETS})
    for target, answer in answers.items():
        leaked = b"root:" in answer or b"class Settings" in answer or b"\nimport " in answer
        if any(status >= 500 for status in statuses(answer)) or leaked or b"location: //" in answer.lower():
            wrong.append((target[:80], answer[:200]))
    assert wrong == []


@pytest.fixture
async def impatient(
    redis_url: str, database_url: str, catalog_file: Path, catalog: Catalog, models_dir: Path, tmp_path: Path
) -> AsyncIterator[Rig]:
    async with running_rig(
        redis_url=redis_url, database_url=database_url, catalog_file=catalog_file, catalog=catalog,
        models_dir=models_dir, journal_dir=tmp_path / "journal", body_timeout_s=0.3, head_timeout_s=0.3,
    ) as running:  # fmt: skip
        yield running


async def test_slow_clients_are_given_up_and_leave_the_others_alone(impatient: Rig):
    heads = (b"", b"GET /livez HTTP/1.1\r\n", b"GET /livez HTTP/1.1\r\nhost: x\r\nx-slow: ")
    unfinished = (*heads, post(impatient, b"content-length: 1000"), post(impatient, b"content-length: 9") + b"{")

    async with asyncio.timeout(4 * ANSWER_S), asyncio.TaskGroup() as tasks:
        slow = [tasks.create_task(told(impatient, sent, wait_s=3 * ANSWER_S)) for sent in unfinished * 20]
        for _ in range(5):
            assert (await impatient.client.get("/livez")).status_code == 200
    assert {tuple(statuses(task.result())) for task in slow} <= {(), (408,)}
    await eventually(impatient.nothing_queued_or_reserved)
