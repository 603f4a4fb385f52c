"""The load generator's client against a server that does what endpoints do."""

import asyncio
import itertools
import ssl
import time

import pytest
from scripted_server import scripted

from contracts.slo import SloTarget
from pdgate.bench.answers import Answer
from pdgate.bench.drive import Driver, client_of
from pdgate.bench.endpoint import Dialect, Endpoint, EndpointError, Route
from pdgate.bench.load import Session, Turn
from pdgate.bench.records import Record
from pdgate.bench.summary import summary_of
from pdgate.bench.texts import Author, Piece, Scale
from pdgate.bench.wire import Framing, WireError, target_of
from tests.processes import until
from tests.security.authority import Authority


def endpoint(url, route=Route.CHAT, **extra):
    return Endpoint(target_of(url), key="k", model="m", route=route, extra=extra)


def sessions(times, *, turns=1, think_s=0.0, system=()):
    return [
        Session(
            at_s=at_s,
            turns=tuple(Turn(pieces=(Piece(f"{number}/{turn}", 10),), output_tokens=2) for turn in range(turns)),
            think_s=think_s,
            system=system,
        )
        for number, at_s in enumerate(times)
    ]


def driver(server, deadline_s=10.0, heard=lambda _: None):
    return Driver(server, Author(Scale(), salt="test"), deadline_s=deadline_s, heard=heard)


def fed(framing, data, sizes):
    found, at = b"", 0
    for size in sizes:
        found += framing.feed(data[at : at + size])
        at += size
        if at >= len(data):
            break
    return found


def test_a_chunked_body_is_the_same_wherever_it_is_cut():
    data = b"5;x=y\r\nhello\r\n1\r\n \r\nC\r\nbig\r\n\r\nworld\r\n0\r\nTrailer: 1\r\n\r\n"
    for size in range(1, len(data) + 1):
        framing = Framing(length=None, chunked=True)
        assert fed(framing, data, itertools.repeat(size)) == b"hello big\r\n\r\nworld"
        assert framing.done


def test_a_body_of_a_stated_length_ends_with_it():
    framing = Framing(length=5, chunked=False)
    assert framing.feed(b"abc") == b"abc"
    assert not framing.done
    assert framing.feed(b"defgh") == b"de"
    assert framing.done


def test_a_chunk_size_that_is_none_is_a_fault():
    with pytest.raises(WireError, match="chunk size"):
        Framing(length=None, chunked=True).feed(b"zz\r\nabc\r\n")


def test_events_are_the_same_wherever_they_are_cut():
    data = (
        b': ping\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
        b'data: {"choices":[{"delta":{"content":"caf\xc3\xa9"}}],"usage":null}\n\n'
        b'data:{"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
        b'"prompt_tokens_details":{"cached_tokens":4}},'
        b'"pdgate":{"cost_nano":123,"currency":"EUR","path":"pd","simulated":true}}\n\ndata: [DONE]\n\n'
    )
    for size in range(1, len(data) + 1):
        answer = Answer()
        answer.head(200, 0.0)
        for at in range(0, len(data), size):
            answer.data(data[at : at + size], float(at))
        assert "".join(answer.text) == "caféhm"
        assert len(answer.event_times_s) == 2
        assert (answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.usage.output_tokens) == (9, 4, 2)
        assert (answer.cost_nano, answer.currency, answer.path, answer.error) == (123, "EUR", "pd", None)


async def test_a_stalled_server_shows_in_every_request_that_should_have_been_sent_meanwhile():
    """Coordinated omission: a client that waits for answers before it sends would see one slow request."""
    gate = asyncio.Event()

    async def stall(exchange):
        await gate.wait()
        await exchange.answer()

    async with scripted(stall) as (url, seen):
        server = endpoint(url)

        async def opened() -> None:
            await until(lambda: len(seen) == 10)
            gate.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(opened())
            step = await driver(server).open_loop(sessions([n * 0.02 for n in range(10)]), name="x", rate_rps=50)
    assert [r.error for r in step.records] == [None] * 10
    # all were sent before any was answered, and each waited from its own intended time to the same moment
    assert max(r.sent_s for r in step.records) <= min(r.first_s for r in step.records)
    for number, record in enumerate(step.records):
        assert record.intended_s == pytest.approx(number * 0.02)
        assert record.ttft_ms == pytest.approx((record.first_s - record.intended_s) * 1000)


async def test_a_client_that_was_late_counts_from_the_intended_time_and_says_that_the_run_is_invalid():
    async def answer(exchange):
        await exchange.answer()

    blocked = []

    def block(record):  # the client's own loop stands still once, after the first request left
        if record is None and not blocked:
            blocked.append(time.sleep(0.3))

    async with scripted(answer) as (url, _):
        step = await driver(endpoint(url), heard=block).open_loop(
            sessions([n * 0.01 for n in range(20)]), name="x", rate_rps=100
        )
    late_ms = [(r.sent_s - r.intended_s) * 1000 for r in step.records]
    assert max(late_ms) > 100
    assert all(r.ttft_ms >= late for r, late in zip(step.records, late_ms, strict=True))
    assert "late" in step.client.invalid_because


def test_a_client_that_kept_up_is_valid_and_one_that_took_its_core_is_not():
    records = [
        Record(
            session=n, turn=0, intended_s=n, sent_s=n + 0.001, first_s=n + 0.1, end_s=n + 0.2,
            asked_prompt_tokens=1, asked_output_tokens=1,
        )
        for n in range(100)
    ]  # fmt: skip
    assert client_of(records, [1.0] * 100, cpu=0.5).invalid_because == ""
    assert client_of(records, [1.0] * 100, cpu=0.99).invalid_because == "the client took 99% of a core"
    assert "lagged 50 ms" in client_of(records, [50.0] * 100, cpu=0.5).invalid_because


async def test_each_kind_of_fault_has_its_name_and_none_counts_as_met():
    faults = ["refused", "broken", "cut", "dropped", "silent", "empty"]

    async def answer(exchange):
        match faults[exchange.number % len(faults)]:
            case "refused":
                await exchange.refuse(429, "rate_limit_exceeded")
            case "broken":
                await exchange.head()
                await exchange.event({"error": {"message": "lost", "code": "worker_lost"}})
                await exchange.end()
            case "cut":
                await exchange.head()
                await exchange.event({"choices": [{"delta": {"content": "half"}}]})
                await exchange.end()
            case "dropped":
                await exchange.head()
                await exchange.event({"choices": [{"delta": {"content": "half"}}]})
                exchange.drop()
            case "silent":
                exchange.drop()
            case "empty":
                await exchange.answer(0)

    async with scripted(answer) as (url, _):
        step = await driver(endpoint(url)).closed_loop(iter(sessions([None] * len(faults))), name="x", concurrency=1)
    found = summary_of(step, SloTarget())
    assert [r.error for r in step.records] == [
        "http_429_rate_limit_exceeded", "stream_worker_lost", "cut", "cut", "connection", "empty",
    ]  # fmt: skip
    assert found.attainment == 0
    assert found.ttft_ms == {}


async def test_an_answer_that_does_not_end_is_given_up_at_its_deadline():
    async def answer(exchange):
        await exchange.head()

    async with scripted(answer) as (url, _):
        slow = driver(endpoint(url), deadline_s=0.1)
        step = await slow.closed_loop(iter(sessions([None])), name="x", concurrency=1)
    assert [r.error for r in step.records] == ["timeout"]


async def test_a_kept_connection_that_the_server_closed_is_replaced_unseen():
    async def answer(exchange):
        await exchange.answer()
        if exchange.number == 0:
            exchange.close()

    async with scripted(answer) as (url, seen):
        step = await driver(endpoint(url)).closed_loop(iter(sessions([None] * 3)), name="x", concurrency=1)
    assert [r.error for r in step.records] == [None] * 3
    assert len(seen) == 3


async def test_the_tokenizer_is_measured_and_options_that_are_refused_are_left_away():
    async def answer(exchange):
        if "ignore_eos" in exchange.body:
            await exchange.refuse(400, "unknown_field")
        else:
            await exchange.answer()

    async with scripted(answer) as (url, seen):
        server = endpoint(url)
        scale = await server.prepare()
        author = Author(scale, salt="s")
        text = author.text((Piece("a", 500),))
    assert server.dialect == Dialect(exact=False)
    assert (scale.tokens_per_word, scale.template_tokens, scale.measured) == (2.0, 7.0, True)
    assert 7 + 2 * len(text.split()) == pytest.approx(500, abs=2)
    assert "stream_options" in seen[-1].body


async def test_an_endpoint_over_https_is_asked_only_if_its_certificate_is_good(tmp_path, monkeypatch):
    async def answer(exchange):
        await exchange.answer()

    authority = Authority(tmp_path)
    signed = authority.sign("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(signed["tls_cert"], signed["tls_key"])
    async with scripted(answer, tls) as (url, seen):
        with pytest.raises(EndpointError, match="certificate verify failed"):
            await endpoint(url).prepare()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        await endpoint(url).prepare()
    assert len(seen) == 2


async def test_an_endpoint_that_refuses_a_first_request_is_said_so_at_once():
    async def answer(exchange):
        await exchange.refuse(401, "invalid_api_key")

    async with scripted(answer) as (url, _):
        with pytest.raises(EndpointError, match="401_invalid_api_key"):
            await endpoint(url).prepare()


async def test_a_later_turn_carries_the_conversation_with_the_answers_that_came():
    async def answer(exchange):
        await exchange.answer()

    async with scripted(answer) as (url, seen):
        two = sessions([0.0], turns=3, system=(Piece("shared", 20),))
        step = await driver(endpoint(url)).open_loop(two, name="x", rate_rps=None)
    roles = [[m["role"] for m in exchange.body["messages"]] for exchange in seen]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    last = seen[-1].body["messages"]
    assert [m["content"] for m in last[:4]] == [m["content"] for m in seen[1].body["messages"]]
    assert last[2]["content"] == " w0 w1"
    assert [r.turn for r in step.records] == [0, 1, 2]
    assert all(later.intended_s >= earlier.end_s for earlier, later in itertools.pairwise(step.records))


async def test_tokens_are_the_servers_count_even_when_an_event_holds_several():
    async def answer(exchange):
        await exchange.answer(2, completion_tokens=11, prompt_tokens=30)

    async with scripted(answer) as (url, _):
        step = await driver(endpoint(url)).closed_loop(iter(sessions([None])), name="x", concurrency=1)
    record = step.records[0]
    assert (record.events, record.output_tokens, record.prompt_tokens) == (2, 11, 30)
    assert record.tpot_ms == pytest.approx(record.decode_ms / 10)
    found = summary_of(step, SloTarget())
    assert found.counted_by_server == 1.0
    assert found.output_tokens_per_s == pytest.approx(11 / step.wall_s)
