"""Models: listed, added, paused, removed. For operators.

1. A model is added only when it could be served: whole weights, room for its workers, a price
   (`gateway.new_models.checked_model`). Its price goes into billing's book first, then the model into the table; so a
   failure between the two leaves a price that nobody asks for, never a model without one.
2. It is removed only when nobody uses it: paused, nothing running or waiting, no name that means it, no worker but
   those that `pdgate up` runs for it and stops with it. Whoever still does is named.
3. What the catalogue's file names is changed there.
"""

import asyncio
import time
from collections.abc import Sequence

from litestar import delete, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.additions import AddedModel
from contracts.errors import NotFound, ServingError
from contracts.rating import Meter
from contracts.v1 import billing_pb2 as pb
from contracts.wire import Change
from gateway.admin.callers import Callers
from gateway.admin.fleet_routes import FleetDesk
from gateway.admin.handlers import AnyRequest, taken
from gateway.admin.money import Noted
from gateway.admin.organisations import Organisations, hold_view
from gateway.admin.paging import ListOf, page
from gateway.admin.shapes import Done, HoldView, NewHold, Thing
from gateway.changes import HoldBook, announce
from gateway.holds import SUSPENDED, Hold
from gateway.model_book import Additions, ModelBook
from gateway.names import NameBook
from gateway.new_models import NewModel, checked_model
from gateway.openapi import json_operation

TAGS = ["admin: fleet"]
MODEL = "/admin/v1/models/{model:str}"


class InCatalogue(ServingError):
    """What is in the catalogue's file is changed there."""

    code, type, http_status = "catalogue", "invalid_request_error", 409


class InUse(ServingError):
    """Somebody still uses the model; the message says who."""

    code, type, http_status = "model_in_use", "invalid_request_error", 409


class ModelDesk:
    """What the handlers do beside reading and answering."""

    def __init__(
        self,
        engine: AsyncEngine,
        redis: Redis,
        desk: FleetDesk,
        *,
        holds: HoldBook,
        additions: Additions,
        noted: Noted,
    ) -> None:
        self.desk = desk
        self._holds = holds
        self._redis = redis
        self._book = ModelBook(engine)
        self._names = NameBook(engine)
        self._additions = additions
        self._noted = noted

    async def views(self) -> Sequence[Thing]:
        """Return every model as it is answered."""
        paused = await self._paused()
        return [self._view(name, paused=name in paused) for name in self.desk.models.catalog.models]

    async def view(self, name: str) -> Thing:
        """Return one model as it is answered."""
        return self._view(name, paused=name in await self._paused())

    async def add(self, wanted: NewModel, *, actor: str) -> AddedModel:
        """Add a model on every gateway, and tell the other processes. Raises BadRequest, NotAddable, NameTaken."""
        models = self.desk.models
        made = await asyncio.to_thread(
            checked_model,
            wanted,
            models.catalog,
            models.models_dir,
            models.list_prices,
            created_unix_s=int(time.time()),
        )
        known = models.list_prices.get(made.name)
        written = {meter: made.model.price.nano(meter.value) for meter in Meter}
        if known is None or any(known.of(meter) != written[meter] for meter in Meter):
            asked = pb.PriceVersion(
                model=made.name,
                by=actor,
                prefill_computed=written[Meter.PREFILL_COMPUTED],
                prefill_cached=written[Meter.PREFILL_CACHED],
                decode=written[Meter.DECODE],
            )
            await self._noted.call("SetPrice", asked, actor=actor, subject=made.name, org=None, kind="price")
        await self._book.add(made, actor=actor)
        await self._tell(made.name)
        return made

    async def remove(self, name: str, *, actor: str) -> None:
        """Take a model out. Raises InCatalogue, InUse."""
        if self._additions.models.from_file(name):
            raise InCatalogue(f"'{name}' is in the catalogue's file: take it out there and start the processes again.")
        if users := await self._users(name):
            raise InUse(f"'{name}' is in use: {'; '.join(users)}.")
        if not await self._book.remove(name, actor=actor):
            raise NotFound(f"There is no model '{name}'.", param="model")
        await self._tell(name)

    async def _paused(self) -> frozenset[str]:
        return frozenset(hold.id for hold in await self._holds.all() if hold.kind == "model")

    def _view(self, name: str, *, paused: bool) -> Thing:
        models = self.desk.models
        model, added = models.catalog.models[name], self._additions.models.added(name)
        value = {
            "id": name,
            "pool": models.catalog.pool_of(name),
            "hand_off": model.hand_off.value,
            "aliases": list(model.aliases),
            "paused": paused,
            "missing": ", ".join(models.missing(name)),
            "context_tokens": model.context_tokens,
            "source": "file" if added is None else "added",
        }
        if added is not None:
            value |= {name: getattr(added, name) for name in ("folder", "profile", "prefill", "decode", "unified")}
        return Thing(object="model", value=value)

    async def _users(self, name: str) -> Sequence[str]:
        """Return who still uses a model, in words."""
        users = []
        if name not in await self._paused():
            users.append("it is not paused")
        if named := [one.name for one in await self._names.all() if name in [target.model for target in one.targets]]:
            users.append(f"the name {', '.join(named)} means it")
        catalog = self.desk.models.catalog
        pool = catalog.pool_of(name)
        if [other for other in catalog.models if other != name and catalog.pool_of(other) == pool]:
            return users  # the pool goes on for the others
        await self.desk.fleet.look()
        view = self.desk.fleet.pool(pool)
        busy = [worker.worker_id for worker in view.workers if worker.num_running or worker.num_waiting]
        if view.inbox_entries or busy:
            users.append(f"{view.inbox_entries} requests run or wait" + (f" on {', '.join(busy)}" if busy else ""))
        own = self._own_workers(name, pool)
        if others := [worker.worker_id for worker in view.workers if worker.worker_id not in own]:
            users.append(f"workers serve it that were started by others: {', '.join(others)}")
        return users

    def _own_workers(self, name: str, pool: str) -> set[str]:
        """Return the ids of the workers that `pdgate up` runs for an added model."""
        added = self._additions.models.added(name)
        return set(added.workers) if added is not None and added.pool == pool else set()

    async def _tell(self, name: str) -> None:
        await self._additions.refresh()
        await announce(self._redis, Change(kind="catalogue", id=name, state=""))


def model_admin_routes(callers: Callers, parts: Organisations, models: ModelDesk) -> list[HTTPRouteHandler]:
    """Return the handlers of models."""
    desk = models.desk

    @get("/admin/v1/models", summary="List models", operation_id="adminListModels", tags=TAGS)
    async def list_models(request: AnyRequest) -> ListOf[Thing]:
        """Return the models: pool, hand-off, aliases, whether they serve, and why not; `source` is file or added."""
        await callers.operator(request)
        return page(request, await models.views(), lambda view: str(view.value["id"]))

    @post(
        "/admin/v1/models",
        summary="Add a model",
        operation_id="adminCreateModel",
        tags=TAGS,
        operation_class=json_operation(NewModel, Thing, status=201),
    )
    async def create_model(request: AnyRequest) -> Thing:
        """Add a model beside the catalogue's file; every process knows it within seconds.

        Refused with 409 `no_weights`, `no_memory` or `no_price` when it could not be served. Its workers: see NewModel.
        """
        caller = await callers.operator(request)
        made = await models.add(await taken(request, NewModel), actor=caller.actor)
        return await models.view(made.name)

    @put(
        f"{MODEL}/hold",
        summary="Pause a model",
        operation_id="adminPauseModel",
        tags=TAGS,
        operation_class=json_operation(NewHold, HoldView),
    )
    async def pause_model(request: AnyRequest, model: FromPath[str]) -> HoldView:
        """Refuse every request for a model, on every gateway within the second. Reversible."""
        caller = await callers.operator(request)
        wanted = await taken(request, NewHold)
        name = desk.public_name(model)
        hold = Hold(kind="model", id=name, mode=SUSPENDED, drain=wanted.drain, reason=wanted.reason, actor=caller.actor)
        await parts.holds.put(hold, org=None)
        await parts.publish()
        return hold_view(hold)

    @delete(f"{MODEL}/hold", summary="Resume a model", operation_id="adminResumeModel", tags=TAGS, status_code=200)
    async def resume_model(request: AnyRequest, model: FromPath[str]) -> Done:
        """Undo a pause."""
        caller = await callers.operator(request)
        name = desk.public_name(model)
        gone = await parts.holds.lift("model", name, org=None, actor=caller.actor)
        await parts.publish()
        return Done(id=name, object="hold", deleted=gone)

    @delete(MODEL, summary="Remove a model", operation_id="adminDeleteModel", tags=TAGS, status_code=200)
    async def delete_model(request: AnyRequest, model: FromPath[str]) -> Done:
        """Remove a model that was added and that nobody uses: pause it first. 409 `model_in_use` says who does."""
        caller = await callers.operator(request)
        name = desk.public_name(model)
        await models.remove(name, actor=caller.actor)
        await parts.holds.lift("model", name, org=None, actor=caller.actor)
        await parts.publish()
        return Done(id=name, object="model", deleted=True)

    return [list_models, create_model, pause_model, resume_model, delete_model]
