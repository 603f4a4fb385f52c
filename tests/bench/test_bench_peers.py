"""What the comparison with other gateways rests on: its worker's words, and the honesty of its first lines."""

import asyncio
import json

from benches import load
from benches.peers.report import losses
from benches.peers.worker import MODEL, Connection, Worker
from workers.engines.timed_text import WORDS, kv_of, state_of, word_at


async def test_the_http_worker_speaks_the_timed_engines_words_one_chunk_a_token():
    worker = Worker("unified", step_ms=1)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(worker), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        request = load.chat_request(f"127.0.0.1:{port}", "k", MODEL, prompt="hello", max_tokens=7)
        streams = await load.run("127.0.0.1", port, [[request, request], [request]], keep_body=True, quick_ack=True)
    body = bytes(streams[0].body).partition(b"\r\n\r\n")[2].decode()
    chunks = [json.loads(line.removeprefix("data: ")) for line in body.split("\n") if line.startswith("data: {")]
    said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    state = state_of(kv_of(json.dumps([{"role": "user", "content": "hello"}]).encode()), 0)
    assert said == ["", *(WORDS[word_at(state, at)] for at in range(7)), None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [stream.status for stream in streams] == [200] * 3
    assert worker.running == []


async def test_a_prefill_worker_answers_one_token():
    worker = Worker("prefill", step_ms=1)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(worker), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        request = load.chat_request(f"127.0.0.1:{port}", "k", MODEL, prompt="hello", max_tokens=7)
        streams = await load.run("127.0.0.1", port, [[request]], keep_body=True)
    assert bytes(streams[0].body).count(b'"content":" ') == 1


def test_where_pdgate_loses_comes_first_and_nothing_is_left_out():
    def one(cpu, tokens, ttfb):
        return {
            name: {"median": value, "low": value, "high": value}
            for name, value in (("cpu_us_per_token", cpu), ("tokens_per_s", tokens), ("added_ttfb_p50_ms", ttfb))
        }

    found = {"pdgate": one(20.0, 100, 2.0), "fast": one(10.0, 300, 3.0), "slow": one(500.0, 50, 1.0)}
    assert losses(found, "pdgate") == [
        "tokens/s at saturation: 100 against 300 of fast (3.0x)",
        "CPU us a token, 70 % load: 20.0 against 10.0 of fast (2.0x)",
        "added first byte P50, ms: 2.00 against 1.00 of slow (2.0x)",
    ]
