"""A worker as routers for SGLang expect one: its HTTP server's paths and chunks, words on a fixed token clock.

    python -m benches.peers.worker --port 9000 --role unified

One step loop serves all streams, as in the timed engine: every `step_ms` each running stream gets one token, in one
chunk of its own. The words are those of the timed engine (workers/engines/timed_text.py). `POST /clock` with
`{"step_ms": 5}` changes the clock. In the role `prefill` an answer is one token at once, as a prefill server's is.
"""

import argparse
import asyncio
import json
import time
from typing import Any, cast

import uvloop

from workers.engines.timed_text import WORDS, kv_of, state_of, word_at

MODEL = "tiny"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
SPOKEN = tuple(json.dumps(word) for word in WORDS)


def framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


class Stream:
    """One answer under way."""

    def __init__(self, transport: asyncio.Transport, prompt: bytes, tokens: int, *, with_usage: bool) -> None:
        self.transport = transport
        self.left = tokens
        self._tokens = tokens
        self._prompt_tokens = max(1, len(prompt) // 4)
        self._with_usage = with_usage
        self._state = state_of(kv_of(prompt), 0)
        self._position = 0
        created = int(time.time())
        self._open = (
            f'data: {{"id":"{self._state:016x}","object":"chat.completion.chunk","created":{created},"model":"{MODEL}",'
            '"choices":[{"index":0,"delta":{"role":null,"content":'
        )
        self._end = (
            ',"reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],'
            '"usage":null}\n\n'
        )
        first = self._open.replace('"role":null', '"role":"assistant"') + '""' + self._end
        transport.write(HEAD + framed(first.encode()))

    def step(self) -> bool:
        """Write one token; return whether there are more."""
        word = SPOKEN[word_at(self._state, self._position)]
        self._position += 1
        self.left -= 1
        self.transport.write(framed((self._open + word + self._end).encode()))
        if self.left:
            return True
        closing = (self._open + "null" + self._end).replace('"finish_reason":null', '"finish_reason":"length"')
        last = framed(closing.encode())
        if self._with_usage:
            usage = {
                "prompt_tokens": self._prompt_tokens,
                "total_tokens": self._prompt_tokens + self._tokens,
                "completion_tokens": self._tokens,
                "prompt_tokens_details": None,
            }
            head = self._open.partition(',"choices"')[0]
            last += framed(f'{head},"choices":[],"usage":{json.dumps(usage)}}}\n\n'.encode())
        self.transport.write(last + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return False


class Worker:
    """The step loop and what it serves."""

    def __init__(self, role: str, step_ms: float) -> None:
        self.role = role
        self.step_ms = step_ms
        self.running: list[Stream] = []
        self._loop = asyncio.get_running_loop()
        self._due = 0.0

    def start(self, stream: Stream) -> None:
        """Begin an answer; its first token comes at once, for nothing is to be computed."""
        if stream.step():
            self.running.append(stream)
            if len(self.running) == 1:
                self._due = self._loop.time() + self.step_ms / 1000
                self._loop.call_at(self._due, self._step)

    def lost(self, transport: asyncio.BaseTransport) -> None:
        """Forget the streams of a connection that is gone."""
        self.running = [stream for stream in self.running if stream.transport is not transport]

    def _step(self) -> None:
        self.running = [stream for stream in self.running if stream.step()]
        if self.running:
            self._due = max(self._loop.time(), self._due + self.step_ms / 1000)
            self._loop.call_at(self._due, self._step)

    def answer(self, path: str, body: dict[str, Any], transport: asyncio.Transport) -> None:
        """Answer one request."""
        if path == "/clock":
            self.step_ms = float(body["step_ms"])
            self._reply(transport, {})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            asked = body.get("max_tokens") or body.get("max_completion_tokens") or 1
            tokens = 1 if self.role == "prefill" else int(asked)
            prompt = json.dumps(body.get("messages") or body.get("prompt")).encode()
            options = body.get("stream_options") or {}
            self.start(Stream(transport, prompt, tokens, with_usage=bool(options.get("include_usage"))))
        elif path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "bench", "root": MODEL}
            self._reply(transport, {"object": "list", "data": [model | {"max_model_len": 8192}]})
        else:
            self._reply(transport, self._facts())

    def _facts(self) -> dict[str, Any]:
        """What health, server_info and model_info are asked for."""
        mode = self.role if self.role in ("prefill", "decode") else "null"
        return {
            "status": "ok",
            "model_path": MODEL,
            "served_model_name": MODEL,
            "tokenizer_path": MODEL,
            "is_generation": True,
            "version": "0.5.23",
            "tp_size": 1,
            "dp_size": 1,
            "max_total_num_tokens": 1_000_000,
            "max_running_requests": 1024,
            "context_length": 8192,
            "disaggregation_mode": mode,
            "internal_states": [{"max_running_requests_per_dp": 1024}],
        }

    @staticmethod
    def _reply(transport: asyncio.Transport, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )


class Connection(asyncio.Protocol):
    """Reads requests of one kept-alive connection."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._transport: asyncio.Transport
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._worker.lost(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            lines = self._data[:end].decode("latin-1").split("\r\n")
            headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
            length = int(headers.get("content-length", 0))
            if len(self._data) < end + 4 + length:
                return
            body = self._data[end + 4 : end + 4 + length]
            self._data = self._data[end + 4 + length :]
            path = lines[0].split(" ")[1].partition("?")[0]
            self._worker.answer(path, json.loads(body) if body else {}, self._transport)


async def serve(port: int, role: str, step_ms: float) -> None:
    worker = Worker(role, step_ms)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(worker), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", choices=("unified", "prefill", "decode"), default="unified")
    parser.add_argument("--step-ms", type=float, default=5.0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.role, arguments.step_ms))


if __name__ == "__main__":
    main()
