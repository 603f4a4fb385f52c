"""The leader's ear for operators: `pdgate workers role` and `drain`."""

import asyncio
import contextlib
import time
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts.beat import beat
from contracts.keys import worker_lease
from contracts.orders import ANSWER_KEPT_MS, MAX_AGE_S, Answer, Order, answer, orders
from contracts.v1 import worker_pb2 as pb
from contracts.wire import FIELD, encode
from scheduler.actuator import Actuator
from scheduler.registry import WorkerRegistry
from scheduler.worker import Standing

log = structlog.get_logger()

POLL_S: Final = 0.5
CONNECT_S: Final = 10.0
"""How long an order waits for its worker: one that has just started has a lease before the scheduler hears it."""
_LOOK_S: Final = 0.05
_decode_order = msgspec.msgpack.Decoder(Order).decode


class Orders:
    """Reads a pool's orders during one term and carries them out, one after the other."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        registry: WorkerRegistry,
        actuator: Actuator,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._connect_s = connect_s
        self._redis = redis
        self._pool = pool
        self._registry = registry
        self._actuator = actuator
        self._from = b"0-0"

    async def run(self) -> None:
        """Obey until cancelled."""
        while True:
            await beat(POLL_S)
            try:
                read: Any = await self._redis.xread({orders(self._pool): self._from}, count=10)
                for _, rows in read or ():
                    for entry_id, fields in rows:
                        self._from = entry_id
                        await self._redis.xdel(orders(self._pool), entry_id)  # first: no order is obeyed twice
                        await self._obey(fields.get(FIELD.encode(), b""))
            except RedisError as error:
                log.warning("orders_failed", pool=self._pool, error=str(error))

    async def _obey(self, raw: bytes) -> None:
        try:
            order = _decode_order(raw)
        except msgspec.MsgspecError as error:
            log.warning("bad_order", pool=self._pool, error=str(error))
            return
        if time.time() * 1000 - order.asked_unix_ms > MAX_AGE_S * 1000:
            log.warning("old_order_dropped", pool=self._pool, order_id=order.order_id)
            return
        await self._connected(order.worker_id)
        result = await self._change_role(order) if order.what == "role" else self._drain(order)
        key = answer(self._pool, order.order_id)
        await self._redis.rpush(key, encode(result))
        await self._redis.pexpire(key, ANSWER_KEPT_MS)

    async def _connected(self, worker_id: str) -> None:
        """Wait for a worker that has a lease, but not for long: what becomes of the order is decided afterwards."""
        if not await self._redis.exists(worker_lease(self._pool, worker_id)):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._connect_s):
                while not self._is_up(worker_id):  # noqa: ASYNC110 - the registry tells its one listener only
                    await asyncio.sleep(_LOOK_S)

    def _is_up(self, worker_id: str) -> bool:
        return any(w.worker_id == worker_id and w.standing is Standing.UP for w in self._registry.workers())

    async def _change_role(self, order: Order) -> Answer:
        if order.role is None:
            return Answer(ok=False, message="the order names no role")
        result = await self._actuator.flip(order.worker_id, order.role, why="operator")
        return Answer(
            ok=result.ok,
            message=result.message,
            role=result.role,
            drain_ms=result.drain_ms,
            switch_ms=result.switch_ms,
        )

    def _drain(self, order: Order) -> Answer:
        for worker in self._registry.workers():
            if worker.worker_id == order.worker_id and worker.standing is Standing.UP:
                drain = pb.Drain(on=order.what == "drain", leader_epoch=self._registry.leader_epoch)
                sent = self._registry.send(worker, pb.ControlCommand(drain=drain))
                return Answer(ok=sent, message="" if sent else "its stream is down", role=worker.role)
        return Answer(ok=False, message=f"no worker {order.worker_id!r} is connected")
