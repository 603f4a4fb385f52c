"""Orders of operators to one worker: its role, its drain. Written to the pool's stream, carried out by its leader.

The answer stays readable for five minutes (contracts/orders.py), so whoever asked looks again instead of waiting on
one connection: a role may take a drain of 60 s and a restart of the engine.
"""

import asyncio
import time
import uuid
from typing import Any, Final, Literal

import msgspec
from litestar import get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.catalog import Catalog
from contracts.errors import BadRequest, DependencyDown, NotFound
from contracts.lifecycle import Role
from contracts.orders import MAX_ORDERS, Answer, Order, answer, orders
from contracts.wire import FIELD, Registration, encode
from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest, taken
from gateway.admin.shapes import NewOrder, OrderView
from gateway.audit import record
from gateway.fleet import Fleet
from gateway.openapi import json_operation

TAGS: Final = ["admin: fleet"]
WORKER: Final = "/admin/v1/workers/{worker:str}"
What = Literal["role", "drain", "undrain"]
_REDIS_S: Final = 2.0
_ACTIONS: Final = {"role": "role_ordered", "drain": "drain_ordered", "undrain": "drain_ended"}
_decode = msgspec.msgpack.Decoder(Answer).decode


class WorkerOrders:
    """Gives orders and reads their answers. Errors: NotFound, BadRequest, DependencyDown."""

    def __init__(self, engine: AsyncEngine, redis: Redis, fleet: Fleet, catalog: Catalog) -> None:
        self._engine = engine
        self._redis = redis
        self._fleet = fleet
        self._catalog = catalog

    def find(self, worker_id: str) -> Registration:
        """Return a worker that has a lease. Raises NotFound."""
        for pool in self._catalog.pools:
            for worker in self._fleet.pool(pool).workers:
                if worker.worker_id == worker_id:
                    return worker
        raise NotFound(f"There is no live worker '{worker_id}'.", param="worker")

    async def give(self, worker_id: str, what: What, role: Role | None, *, actor: str, wait_s: int) -> OrderView:
        """Write an order, with a row in the record of changes, and wait so long for its answer."""
        if (what == "role") != (role is not None):
            raise BadRequest('\'role\' goes with "what": "role", and only with it.', param="role")
        worker = self.find(worker_id)
        order = Order(
            order_id=uuid.uuid4().hex, worker_id=worker_id, what=what, role=role, asked_unix_ms=int(time.time() * 1000)
        )
        async with self._engine.begin() as db:
            detail = {"pool": worker.pool, "was": worker.role.value, **({"role": role.value} if role else {})}
            await record(
                db, actor=actor, action=_ACTIONS[what], kind="worker", subject=worker_id, org=None, detail=detail
            )
            try:
                async with asyncio.timeout(_REDIS_S):
                    await self._redis.xadd(orders(worker.pool), {FIELD: encode(order)}, maxlen=MAX_ORDERS)
            except (RedisError, OSError):
                raise DependencyDown("Orders cannot be given right now.", retry_after_s=2) from None
        return await self.look(worker_id, order.order_id, wait_s=wait_s)

    async def look(self, worker_id: str, order_id: str, *, wait_s: int = 0) -> OrderView:
        """Return how an order of the last minutes stands, waiting so long for its answer."""
        key = answer(self.find(worker_id).pool, order_id)
        try:
            async with asyncio.timeout(wait_s + _REDIS_S):
                raw: Any = await self._redis.lindex(key, 0)
                if raw is None and wait_s > 0:
                    raw = await self._redis.blmove(key, key, wait_s)  # it stays there
        except (RedisError, OSError):
            raise DependencyDown("Orders cannot be looked at right now.", retry_after_s=2) from None
        if raw is None:
            return OrderView(id=order_id, worker_id=worker_id, state="pending")
        found = _decode(raw)
        return OrderView(
            id=order_id,
            worker_id=worker_id,
            state="done" if found.ok else "refused",
            message=found.message,
            role=found.role.value if found.role else None,
            drain_ms=found.drain_ms,
            switch_ms=found.switch_ms,
        )


def order_routes(callers: Callers, given: WorkerOrders) -> list[HTTPRouteHandler]:
    """Return the handlers of orders to workers."""

    @get(WORKER, summary="Get a worker", operation_id="getWorker", tags=TAGS)
    async def get_worker(request: AnyRequest, worker: FromPath[str]) -> Registration:
        """Return a worker's lease: role, state, what it runs."""
        await callers.operator(request)
        return given.find(worker)

    @post(
        f"{WORKER}/orders",
        summary="Drain a worker or give it a role",
        operation_id="orderWorker",
        tags=TAGS,
        operation_class=json_operation(NewOrder, OrderView, status=201),
    )
    async def order_worker(request: AnyRequest, worker: FromPath[str]) -> OrderView:
        """Order a drain, its end, or another role. `state` is pending, done or refused; look again by its id.

        Unless the pool's mode is `manual`, the controller may undo a role that it does not want.
        """
        caller = await callers.operator(request)
        wanted = await taken(request, NewOrder)
        role = Role(wanted.role) if wanted.role else None
        return await given.give(worker, wanted.what, role, actor=caller.actor, wait_s=wanted.wait_s)

    @get(f"{WORKER}/orders/{{order:str}}", summary="Get an order", operation_id="getWorkerOrder", tags=TAGS)
    async def get_order(request: AnyRequest, worker: FromPath[str], order: FromPath[str]) -> OrderView:
        """Return how an order of the last five minutes stands."""
        await callers.operator(request)
        return await given.look(worker, order)

    return [get_worker, order_worker, get_order]
