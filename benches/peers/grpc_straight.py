"""First tokens straight from the gRPC worker, in smg's environment: prints their times in ms as JSON.

python benches/peers/grpc_straight.py 127.0.0.1:9000 120
"""

import asyncio
import json
import sys
import time

import grpc.aio
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as services


async def main(address: str, count: int) -> None:
    times_ms = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = services.SglangSchedulerStub(channel)
        for number in range(count):
            request = pb.GenerateRequest(
                request_id=str(number),
                tokenized=pb.TokenizedInput(input_ids=range(100, 140)),
                sampling_params=pb.SamplingParams(max_new_tokens=1),
                stream=True,
            )
            start_s = time.perf_counter()
            first = 0.0
            async for _ in stub.Generate(request):
                first = first or time.perf_counter()
            times_ms.append((first - start_s) * 1000)
    print(json.dumps(times_ms))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
