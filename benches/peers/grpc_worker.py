"""A worker as smg's gRPC mode expects one: SGLang's servicer, token ids on a fixed token clock.

    python benches/peers/grpc_worker.py --port 9000 --clock-port 9001 --tokens ids.json --tokenizer FOLDER

It runs in smg's own environment, which holds the protocol (`smg-grpc-proto`), and imports nothing of this project. The
router sends token ids and gets token ids; it tokenizes and detokenizes itself. As in the HTTP worker each stream gets
one message per token, and `POST /clock` on the other port changes the clock.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as services

MODEL = "tiny"
CONTEXT = 8192


class Worker(services.SglangSchedulerServicer):
    """One step loop: a condition that every running stream waits for."""

    def __init__(self, role: str, ids: list[int], tokenizer: str) -> None:
        self.step_ms = 5.0
        self._role = role
        self._ids = ids
        self._tokenizer = tokenizer
        self._stepped = asyncio.Event()
        self._running = 0

    async def tick(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(loop.time(), due + self.step_ms / 1000)
            await asyncio.sleep(due - loop.time())
            stepped, self._stepped = self._stepped, asyncio.Event()
            stepped.set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - the protocol's name
        del context
        tokens = 1 if self._role == "prefill" else request.sampling_params.max_new_tokens
        prompt = len(request.tokenized.input_ids)
        start = sum(request.tokenized.input_ids)
        said = [self._ids[(start + 31 * at) % len(self._ids)] for at in range(tokens)]
        for at, token in enumerate(said):
            if at:
                await self._stepped.wait()
            yield pb.GenerateResponse(
                request_id=request.request_id,
                chunk=pb.GenerateStreamChunk(token_ids=[token], prompt_tokens=prompt, completion_tokens=at + 1),
            )
        yield pb.GenerateResponse(
            request_id=request.request_id,
            complete=pb.GenerateComplete(
                output_ids=said, finish_reason="length", prompt_tokens=prompt, completion_tokens=tokens
            ),
        )

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        del request, context
        return pb.HealthCheckResponse(healthy=True, message="ok")

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        del request, context
        return pb.AbortResponse(success=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        del request, context
        return pb.GetModelInfoResponse(
            model_path=self._tokenizer,
            tokenizer_path=self._tokenizer,
            is_generation=True,
            served_model_name=MODEL,
            max_context_length=CONTEXT,
            vocab_size=4096,
            eos_token_ids=[2],
            max_req_input_len=CONTEXT,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        del request, context
        answer = pb.GetServerInfoResponse(sglang_version="0.5.23", server_type="grpc", max_total_num_tokens=1_000_000)
        mode = self._role if self._role in ("prefill", "decode") else "null"
        answer.server_args.update(
            {"model_path": self._tokenizer, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1}
        )
        answer.server_args.update({"tokenizer_path": self._tokenizer, "disaggregation_mode": mode})
        return answer


async def clock(worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take one `POST /clock`, or say at any other path that the worker is there, by its model's name."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if head.startswith("post /clock"):
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
        worker.step_ms = float(json.loads(await reader.readexactly(length))["step_ms"])
    body = MODEL.encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    writer.close()


async def serve(arguments: argparse.Namespace) -> None:
    worker = Worker(arguments.role, arguments.tokens, arguments.tokenizer)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 4096)))
    services.add_SglangSchedulerServicer_to_server(worker, server)
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    await server.start()
    await asyncio.start_server(lambda r, w: clock(worker, r, w), "127.0.0.1", arguments.clock_port)
    await worker.tick()


def read_ids(file: str) -> list[int]:
    ids: list[int] = json.loads(Path(file).read_text())
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clock-port", type=int, required=True)
    parser.add_argument("--role", choices=("unified", "prefill", "decode"), default="unified")
    parser.add_argument("--tokens", required=True, type=read_ids, help="file with a JSON list of token ids to say")
    parser.add_argument("--tokenizer", required=True, help="folder")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
