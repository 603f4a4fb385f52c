"""Names of models that operators give beside the catalogue: aliases, shares of a name (canaries), and when one ends.

The catalogue says which models there are; it is a file, read at the start. What a name means may change while all runs:
an alias moves to the next version, a new version takes a few percent, an old name is deprecated and later gone.

1. Who changes a name writes it to Postgres with a row in the record of changes, and tells the gateways.
2. Every gateway has all names in memory and reads them again when told, and every few seconds.
3. `Names.choose` is asked once per request. A session always gets the same target while the weights stay; when a weight
   grows, only that share of sessions moves, since targets keep their order.
"""

import datetime as dt
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.utils import format_datetime
from typing import Annotated, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.catalog import Catalog
from contracts.errors import BadRequest, ServingError
from gateway.audit import record
from gateway.tables import model_name

_SCALE: Final = 2**64


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the catalogue that serves a name, and its share among the name's targets."""

    model: str
    weight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1


class Name(msgspec.Struct, frozen=True, kw_only=True):
    """One name. Without targets it is a model of the catalogue, of which something else is said here."""

    name: str
    targets: tuple[Target, ...] = ()
    deprecated_at: dt.datetime | None = None
    sunset_at: dt.datetime | None = None  # from then on it is refused
    replacement: str = ""
    actor: str = ""


class Withdrawn(ServingError):
    """The name's sunset has passed."""

    code, type, http_status = "model_withdrawn", "invalid_request_error", 404

    def __init__(self, name: Name) -> None:
        at = f" on {name.sunset_at:%Y-%m-%d}" if name.sunset_at else ""
        instead = f" Use '{name.replacement}'." if name.replacement else ""
        super().__init__(f"The model '{name.name}' was withdrawn{at}.{instead}", param="model")


class Names:
    """All names, in memory."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._known: Mapping[str, Name] = {}
        self._now = now

    def replace(self, names: Iterable[Name]) -> None:
        """Take the whole record."""
        self._known = {one.name: one for one in names}

    def all(self) -> Sequence[Name]:
        """Return every name, by name."""
        return sorted(self._known.values(), key=lambda one: one.name)

    def find(self, name: str) -> Name | None:
        """Return what is said of a name; None = nothing."""
        return self._known.get(name)

    def check(self, name: Name) -> None:
        """Raise Withdrawn when a name's sunset has passed."""
        if name.sunset_at is not None and name.sunset_at.timestamp() <= self._now():
            raise Withdrawn(name)

    def choose(self, name: Name, sticky: str, usable: Callable[[str], bool]) -> str:
        """Return the model that serves this request: by weight, of those that can serve at all if any can.

        `sticky`: equal ones get the same target.
        """
        able = [one for one in name.targets if usable(one.model)] or list(name.targets)
        point = _point(f"{name.name}\0{sticky}") * sum(one.weight for one in able)
        for one in able:
            point -= one.weight
            if point < 0:
                return one.model
        return able[-1].model


class NameBook:
    """Repository of names. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def all(self) -> Sequence[Name]:
        """Return every name."""
        async with self._engine.begin() as db:
            rows = (await db.execute(sa.select(model_name).order_by(model_name.c.name))).mappings().all()
        return [
            Name(
                name=row["name"],
                targets=msgspec.convert(row["targets"], tuple[Target, ...]),
                **{field: row[field] for field in ("deprecated_at", "sunset_at", "replacement", "actor")},
            )
            for row in rows
        ]

    async def put(self, wanted: Name) -> None:
        """Say what a name means, in place of what was said before."""
        values = msgspec.structs.asdict(wanted) | {"targets": msgspec.to_builtins(wanted.targets)}
        async with self._engine.begin() as db:
            await db.execute(sa.delete(model_name).where(model_name.c.name == wanted.name))
            await db.execute(sa.insert(model_name).values(values))
            detail = msgspec.to_builtins(msgspec.structs.replace(wanted, name="", actor=""))
            await record(
                db, actor=wanted.actor, action="named", kind="name", subject=wanted.name, org=None, detail=detail
            )

    async def remove(self, name: str, *, actor: str) -> bool:
        """Forget a name; False when nothing was said of it."""
        async with self._engine.begin() as db:
            gone = await db.execute(sa.delete(model_name).where(model_name.c.name == name))
            if gone.rowcount:
                await record(db, actor=actor, action="unnamed", kind="name", subject=name, org=None)
        return bool(gone.rowcount)


def checked(wanted: Name, catalog: Catalog) -> Name:
    """Return a name that can be kept, its targets by their public names. Raises BadRequest."""
    if wanted.name in catalog.routes:
        raise BadRequest(f"'{wanted.name}' is a route of the catalogue; it is changed there.", param="name")
    if not wanted.targets and wanted.name not in catalog.models:
        raise BadRequest(f"'{wanted.name}' is no model of the catalogue, so it needs targets.", param="targets")
    targets: dict[str, Target] = {}
    for one in wanted.targets:
        found = catalog.find(one.model)
        if found is None or found[0] in targets:
            why = "is named twice" if found else "is not in the catalogue"
            raise BadRequest(f"The target '{one.model}' {why}.", param="targets")
        targets[found[0]] = msgspec.structs.replace(one, model=found[0])
    moments = [at for at in (wanted.deprecated_at, wanted.sunset_at) if at is not None]
    if any(at.tzinfo is None for at in moments):
        raise BadRequest("A date needs its zone, such as 2026-12-31T00:00:00Z.", param="sunset_at")
    if len(moments) == 2 and moments[1] < moments[0]:
        raise BadRequest("'sunset_at' is before 'deprecated_at'.", param="sunset_at")
    return msgspec.structs.replace(wanted, targets=tuple(targets.values()))


def notices(name: Name) -> dict[str, str]:
    """Return the headers that tell clients of a name's end: RFC 9745 (Deprecation), RFC 8594 (Sunset)."""
    headers: dict[str, str] = {}
    if name.deprecated_at is not None:
        headers["deprecation"] = f"@{int(name.deprecated_at.timestamp())}"
    if name.sunset_at is not None:
        headers["sunset"] = format_datetime(name.sunset_at.astimezone(dt.UTC), usegmt=True)
    if headers and name.replacement:
        headers["link"] = f'</v1/models/{name.replacement}>; rel="successor-version"'
    return headers


def _point(text: str) -> float:
    """Return a place in [0, 1) that a text always has."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / _SCALE
