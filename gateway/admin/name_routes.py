"""Names of models: aliases, shares of a name and the dates of its end. For operators."""

import datetime as dt
from typing import Any

import msgspec
from litestar import delete, get, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.errors import BadRequest, ServingError
from contracts.wire import Change
from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest, taken
from gateway.admin.paging import ListOf, page
from gateway.admin.shapes import Done, NameView, NewName
from gateway.changes import announce
from gateway.models import Models
from gateway.names import Name, NameBook, checked
from gateway.openapi import json_operation

TAGS = ["admin: fleet"]
NAME = "/admin/v1/model-names/{name:path}"
_LONGEST = 200


class NotServable(ServingError):
    """A target could not serve now; the message says what it lacks."""

    code, type, http_status = "target_not_ready", "invalid_request_error", 409


class NameDesk:
    """What the handlers do beside reading and answering."""

    def __init__(self, engine: AsyncEngine, redis: Redis, models: Models) -> None:
        self.book = NameBook(engine)
        self.models = models
        self._redis = redis

    async def put(self, wanted: Name, *, unready: bool) -> Name:
        """Keep a name. Raises BadRequest; NotServable unless `unready` targets are wanted."""
        kept = checked(wanted, self.models.catalog)
        for target in kept.targets:
            lacking = self.models.missing(target.model)
            if lacking and not unready:
                raise NotServable(f"'{target.model}' cannot serve now: {', '.join(lacking)}.", param="targets")
        await self.book.put(kept)
        await self.tell(kept.name)
        return kept

    async def tell(self, name: str) -> None:
        """Make every gateway read the names again. They do so every few seconds anyway."""
        self.models.names.replace(await self.book.all())
        await announce(self._redis, Change(kind="name", id=name, state=""))


def name_routes(callers: Callers, desk: NameDesk) -> list[HTTPRouteHandler]:
    """Return the handlers of names."""

    @get("/admin/v1/model-names", summary="List names of models", operation_id="listModelNames", tags=TAGS)
    async def list_names(request: AnyRequest) -> ListOf[NameView]:
        """Return what operators said of names; the catalogue's own aliases are with its models."""
        await callers.operator(request)
        return page(request, [_view(one) for one in await desk.book.all()], lambda view: view.name)

    @put(
        NAME,
        summary="Say what a name means",
        operation_id="putModelName",
        tags=TAGS,
        operation_class=json_operation(NewName, NameView),
    )
    async def put_name(request: AnyRequest, name: FromPath[str]) -> NameView:
        """Make an alias (one target), share a name by weight (several), or set the dates of its end.

        A session keeps its target. From `deprecated_at` and `sunset_at` on answers say so in headers; after
        `sunset_at` the name is refused. A target that could not serve now is refused unless `unready` is true.
        """
        caller = await callers.operator(request)
        wanted = await taken(request, NewName)
        fields: dict[str, Any] = {
            field: getattr(wanted, field) for field in ("targets", "deprecated_at", "sunset_at", "replacement")
        }
        return _view(await desk.put(Name(name=_named(name), actor=caller.actor, **fields), unready=wanted.unready))

    @delete(NAME, summary="Forget a name", operation_id="deleteModelName", tags=TAGS, status_code=200)
    async def delete_name(request: AnyRequest, name: FromPath[str]) -> Done:
        """Say nothing of a name any more: it means what the catalogue says."""
        caller = await callers.operator(request)
        gone = await desk.book.remove(_named(name), actor=caller.actor)
        await desk.tell(_named(name))
        return Done(id=_named(name), object="model_name", deleted=gone)

    return [list_names, put_name, delete_name]


def _named(path: str) -> str:
    name = path.removeprefix("/")
    if not 0 < len(name) <= _LONGEST or not name.isprintable():
        raise BadRequest(f"A name has 1 to {_LONGEST} printable characters.", param="name")
    return name


def _view(one: Name) -> NameView:
    def utc(at: dt.datetime | None) -> dt.datetime | None:
        return at.astimezone(dt.UTC) if at is not None else None

    return NameView(
        name=one.name,
        targets=tuple(msgspec.to_builtins(one.targets)),
        deprecated_at=utc(one.deprecated_at),
        sunset_at=utc(one.sunset_at),
        replacement=one.replacement,
        actor=one.actor,
    )
