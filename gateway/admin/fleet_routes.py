"""Workers, who decides about a pool's ratio, and what was decided. For operators."""

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec
from litestar import delete, get, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts import keys
from contracts.errors import NotFound, ServingError
from contracts.lifecycle import HandOff
from contracts.series import read_series
from contracts.steering import Steering, decode_steering, encode_steering
from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest, taken
from gateway.admin.paging import ListOf, limit_of, page
from gateway.admin.shapes import Done, SteeringChange, Thing
from gateway.audit import record
from gateway.fleet import Fleet
from gateway.models import Models
from gateway.openapi import json_operation

TAGS = ["admin: fleet"]
POOL = "/admin/v1/pools/{pool:str}"
_TAIL_BYTES: Final = 512 * 1024


class NeedsManual(ServingError):
    """A worker's role follows from the split, which somebody else decides."""

    code, type, http_status = "controller_decides", "invalid_request_error", 409


class FleetDesk:
    """What the handlers do beside reading and answering."""

    def __init__(self, engine: AsyncEngine, redis: Redis, models: Models, fleet: Fleet, decision_log: str) -> None:
        self.redis = redis
        self.models = models
        self.fleet = fleet
        self._engine = engine
        self._decisions = Path(decision_log) if decision_log else None

    def check_pool(self, pool: str) -> None:
        """Raise NotFound when there is no such pool."""
        if pool not in self.models.catalog.pools:
            raise NotFound(f"There is no pool '{pool}'.", param="pool")

    def public_name(self, model: str) -> str:
        """Return the public name of a model or alias. Raises NotFound."""
        found = self.models.catalog.find(model)
        if found is None:
            raise NotFound(f"There is no model '{model}'.", param="model")
        return found[0]

    async def steering(self, pool: str) -> Steering | None:
        """Return what an operator set; None = the scheduler's own settings."""
        raw: Any = await self.redis.get(keys.steering(pool))
        return decode_steering(raw) if raw else None

    async def steer(self, pool: str, wanted: Steering | None, *, actor: str) -> None:
        """Set who decides; None = the scheduler's own settings."""
        if wanted is None:
            await self.redis.delete(keys.steering(pool))
        else:
            await self.redis.set(keys.steering(pool), encode_steering(wanted))
        detail = msgspec.to_builtins(wanted) if wanted is not None else {}
        async with self._engine.begin() as db:
            await record(db, actor=actor, action="steered", kind="pool", subject=pool, org=None, detail=detail)

    async def decisions(self, pool: str, limit: int) -> list[Any]:
        """Return the newest records of a pool's decision log, the oldest of them first. Raises NotFound."""
        if self._decisions is None:
            raise NotFound("This gateway does not see the decision logs: set GATEWAY_DECISION_LOG to their folder.")
        lines = await asyncio.to_thread(_tail, self._decisions / f"{pool}.jsonl")
        return [msgspec.json.decode(line) for line in lines[-limit:]]


def fleet_routes(callers: Callers, desk: FleetDesk) -> list[HTTPRouteHandler]:
    """Return the handlers of workers and pools."""

    @get("/admin/v1/workers", summary="List workers", operation_id="listWorkers", tags=TAGS)
    async def list_workers(request: AnyRequest) -> ListOf[Thing]:
        """Return the workers with a lease; filter by `pool`, `role`, `state`."""
        await callers.operator(request)
        found = [worker for pool in desk.models.catalog.pools for worker in desk.fleet.pool(pool).workers]
        views = [Thing(object="worker", value=msgspec.to_builtins(worker)) for worker in found]
        for name in ("pool", "role", "state"):
            wanted = request.query_params.get(name)
            views = [view for view in views if wanted in (None, view.value[name])]
        return page(request, views, lambda view: str(view.value["worker_id"]))

    @get(f"{POOL}/steering", summary="Get who decides", operation_id="getSteering", tags=TAGS)
    async def get_steering(request: AnyRequest, pool: FromPath[str]) -> Thing:
        """Return who decides about the ratio; `source` is settings when no operator set it."""
        await callers.operator(request)
        desk.check_pool(pool)
        found = await desk.steering(pool)
        value = {"source": "settings"} if found is None else {"source": "operator", **msgspec.to_builtins(found)}
        return Thing(object="steering", value=value)

    @put(
        f"{POOL}/steering",
        summary="Set mode and ratio",
        operation_id="putSteering",
        tags=TAGS,
        operation_class=json_operation(SteeringChange, Thing),
    )
    async def put_steering(request: AnyRequest, pool: FromPath[str]) -> Thing:
        """Set the controller's mode; under `manual` the split to keep, which changes workers' roles one by one."""
        caller = await callers.operator(request)
        desk.check_pool(pool)
        wanted = await taken(request, SteeringChange)
        if wanted.mode == "manual":
            check_split(desk, pool, wanted)
        steering = Steering(**msgspec.structs.asdict(wanted))
        await desk.steer(pool, steering, actor=caller.actor)
        return Thing(object="steering", value={"source": "operator", **msgspec.to_builtins(steering)})

    @delete(
        f"{POOL}/steering",
        summary="Leave it to the settings",
        operation_id="deleteSteering",
        tags=TAGS,
        status_code=200,
    )
    async def delete_steering(request: AnyRequest, pool: FromPath[str]) -> Done:
        """Forget what an operator set."""
        caller = await callers.operator(request)
        desk.check_pool(pool)
        await desk.steer(pool, None, actor=caller.actor)
        return Done(id=pool, object="steering", deleted=True)

    @get(f"{POOL}/series", summary="Get a pool's course", operation_id="getSeries", tags=TAGS)
    async def get_series(request: AnyRequest, pool: FromPath[str]) -> ListOf[Thing]:
        """Return the newest points, one each 5 s: split, target and why, attainment, queues, flips."""
        await callers.operator(request)
        desk.check_pool(pool)
        points = await read_series(desk.redis, pool, count=limit_of(request))
        return ListOf(data=[Thing(object="point", value=msgspec.to_builtins(point)) for point in points])

    @get(f"{POOL}/decisions", summary="Get the newest decisions", operation_id="listDecisions", tags=TAGS)
    async def list_decisions(request: AnyRequest, pool: FromPath[str]) -> ListOf[Thing]:
        """Return the tail of the decision log, the oldest first."""
        await callers.operator(request)
        desk.check_pool(pool)
        found = await desk.decisions(pool, limit_of(request))
        return ListOf(data=[Thing(object="decision", value=one) for one in found])

    return [list_workers, get_steering, put_steering, delete_steering, get_series, list_decisions]


def check_split(desk: FleetDesk, pool: str, wanted: SteeringChange) -> None:
    """Raise NeedsManual when no path would be left, or when the pool has other workers than the split asks for."""
    workers = len(desk.fleet.pool(pool).workers)
    total = wanted.prefill + wanted.decode + wanted.unified
    if not wanted.unified and not (wanted.prefill and wanted.decode):
        raise NeedsManual("A split needs a prefill and a decode worker, or a unified one: nothing could serve.")
    if total != workers:
        raise NeedsManual(f"The pool has {workers} workers; the split asks for {total}.")
    store = any(
        model.hand_off is HandOff.STORE
        for name, model in desk.models.catalog.models.items()
        if desk.models.catalog.pool_of(name) == pool
    )
    unified = sum(worker.role == "unified" for worker in desk.fleet.pool(pool).workers)
    if (
        not store
        and wanted.unified != unified
        and not all("role_switch" in worker.capabilities for worker in desk.fleet.pool(pool).workers)
    ):
        raise NeedsManual("Workers of this pool cannot become unified, or cease to be, while they run.")


def _tail(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as log:
            log.seek(0, 2)
            size = log.tell()
            log.seek(max(0, size - _TAIL_BYTES))
            lines = log.read().splitlines()
    except FileNotFoundError:
        return []
    return lines[1:] if size > _TAIL_BYTES else lines
