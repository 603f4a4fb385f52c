"""What `pdgate doctor` tries on workers: can somebody without the token or a certificate give them work?"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc.aio

from contracts.credentials import is_loopback
from contracts.v1 import worker_pb2_grpc
from contracts.wire import Registration
from pdgate.findings import Check, judged

_ANSWER_S: Final = 2.0
_AT_ONCE: Final = 16
_OPEN: Final = "open"
_CLOSED: Final = "closed"
_CHANGE: Final = "set WORKER_PEER_TOKEN, and the same in GATEWAY_PEER_TOKEN and SCHEDULER_PEER_TOKEN"
_AWAY: Final = "not reached from here"


async def peer_checks(workers: Sequence[Registration]) -> Sequence[Check]:
    """Knock at every worker without showing anything, and judge; none without workers."""
    if not workers:
        return []
    room = asyncio.Semaphore(_AT_ONCE)
    async with asyncio.TaskGroup() as tasks:
        asked = {worker.worker_id: tasks.create_task(_knock(worker.address, room)) for worker in workers}
    found = {worker_id: task.result() for worker_id, task in asked.items()}
    opened = sorted(
        worker.worker_id for worker in workers if found[worker.worker_id] == _OPEN and not is_loopback(worker.address)
    )
    counts = ", ".join(
        f"{list(found.values()).count(what)} {what}" for what in (_CLOSED, _OPEN, _AWAY) if what in found.values()
    )
    return [
        judged(
            "gRPC of workers, without token or certificate",
            counts,
            [
                (
                    bool(opened),
                    f"anybody who reaches {', '.join(opened)} can give work to it: {_CHANGE}",
                )
            ],
        )
    ]


async def _knock(address: str, room: asyncio.Semaphore) -> str:
    """Open an Attach stream and say nothing: who asks for a token ends it at once."""
    async with room, grpc.aio.insecure_channel(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Attach(timeout=_ANSWER_S)
        code = await call.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return _CLOSED
    return _AWAY if code is grpc.StatusCode.UNAVAILABLE else _OPEN
