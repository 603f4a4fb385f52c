"""`pdgate models names|alias|unalias`: what names of models mean beside the catalogue."""

import asyncio
import datetime as dt
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from contracts.errors import BadRequest
from contracts.wire import Change
from gateway.changes import announce
from gateway.names import Name, NameBook, Target, checked
from pdgate.connection import open_database, open_redis
from pdgate.output import AsJson, show
from pdgate.preflight import CannotStart
from pdgate.serving_commands import CatalogFile, all_models
from pdgate.tenant_commands import operator, when


class NameRow(msgspec.Struct, frozen=True, kw_only=True):
    """A name as it is printed."""

    name: str
    targets: str  # MODEL:WEIGHT, in order
    deprecated: str
    sunset: str
    replacement: str


def list_names(as_json: AsJson = False) -> None:
    """List the names that operators gave: aliases, shares and dates of an end."""

    async def run() -> list[NameRow]:
        async with open_database() as database:
            return [_row(one) for one in await NameBook(database).all()]

    show(asyncio.run(run()), as_json=as_json, empty="no name beside the catalogue's own")


def put_name(
    name: Annotated[str, typer.Argument(help="What clients ask for.")],
    targets: Annotated[list[str] | None, typer.Argument(help="MODEL, or MODEL=WEIGHT for a share.")] = None,
    deprecated: Annotated[str, typer.Option(help="Answers say so from now on: YYYY-MM-DD.")] = "",
    sunset: Annotated[str, typer.Option(help="The name is refused from this day on: YYYY-MM-DD.")] = "",
    replacement: Annotated[str, typer.Option(help="The name to use instead.")] = "",
    file: CatalogFile = None,
    as_json: AsJson = False,
) -> None:
    """Make an alias, share a name between models by weight (a canary), or set the dates of its end."""
    wanted = Name(
        name=name,
        targets=tuple(_target(text) for text in targets or ()),
        deprecated_at=_day(deprecated),
        sunset_at=_day(sunset),
        replacement=replacement,
        actor=operator(),
    )
    show([asyncio.run(_put(wanted, file))], as_json=as_json)


def remove_name(name: Annotated[str, typer.Argument()]) -> None:
    """Forget what was said of a name: it means what the catalogue says."""

    async def run() -> bool:
        async with open_database() as database, open_redis() as redis:
            gone = await NameBook(database).remove(name, actor=operator())
            await announce(redis, Change(kind="name", id=name, state=""))
            return gone

    if not asyncio.run(run()):
        raise CannotStart(f"nothing was said of {name!r}: see `pdgate models names`")


async def _put(wanted: Name, file: Path | None) -> NameRow:
    async with open_database() as database, open_redis() as redis:
        try:
            kept = checked(wanted, await all_models(redis, file))
        except BadRequest as error:
            raise CannotStart(error.message) from None
        await NameBook(database).put(kept)
        await announce(redis, Change(kind="name", id=kept.name, state=""))
    return _row(kept)


def _target(text: str) -> Target:
    model, separator, weight = text.rpartition("=")
    if not separator:
        return Target(model=text)
    if not (weight.isascii() and weight.isdigit() and 1 <= int(weight) <= 1_000_000):
        raise typer.BadParameter(f"{text!r}: a weight is a whole number from 1 to 1000000", param_hint="TARGETS")
    return Target(model=model, weight=int(weight))


def _day(text: str) -> dt.datetime | None:
    if not text:
        return None
    try:
        return dt.datetime.combine(dt.date.fromisoformat(text), dt.time(), dt.UTC)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a day: write YYYY-MM-DD") from None


def _row(one: Name) -> NameRow:
    return NameRow(
        name=one.name,
        targets=", ".join(f"{target.model}:{target.weight}" for target in one.targets),
        deprecated=when(one.deprecated_at) if one.deprecated_at else "",
        sunset=when(one.sunset_at) if one.sunset_at else "",
        replacement=one.replacement,
    )
