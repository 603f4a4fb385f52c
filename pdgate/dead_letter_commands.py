"""`pdgate usage dead-letters`: what billing could not write."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from billing.dead_letters import DeadLetter, DeadLetters
from pdgate.connection import open_redis
from pdgate.output import AsJson, show, show_json
from pdgate.preflight import CannotStart
from pdgate.serving_commands import all_models

dead_letters = typer.Typer(help="Entries that billing could not write.", no_args_is_help=True)

T = TypeVar("T")
Reason = Annotated[str | None, typer.Option(help="Only those with this reason, for example no_price.")]


class LetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter as it is listed."""

    id: str
    buried: str
    reason: str
    num_bytes: int


class LetterView(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter with what it says."""

    id: str
    buried: str
    reason: str
    content: Any


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries were delivered again."""

    redriven: int


@dead_letters.command("list")
def list_all(reason: Reason = None, as_json: AsJson = False) -> None:
    """List what was buried, oldest first."""
    found = _with(lambda letters: letters.list(reason=reason))
    rows = [
        LetterRow(
            id=one.id,
            buried=one.buried_at.isoformat(timespec="seconds"),
            reason=one.reason,
            num_bytes=len(one.raw),
        )
        for one in found
    ]
    show(rows, as_json=as_json, empty="nothing is buried")


@dead_letters.command("show")
def show_one(letter: Annotated[str, typer.Argument(help="Id from the list.")]) -> None:
    """Print what an entry says, as JSON."""
    one = _with(lambda letters: letters.find(letter))
    if one is None:
        raise CannotStart(f"there is no dead letter {letter}")
    show_json(
        LetterView(
            id=one.id, buried=one.buried_at.isoformat(timespec="seconds"), reason=one.reason, content=one.content
        )
    )


@dead_letters.command("redrive")
def redrive(
    letters: Annotated[list[str] | None, typer.Argument(help="Ids from the list.")] = None,
    reason: Reason = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them, or all with the reason.")] = False,
    as_json: AsJson = False,
) -> None:
    """Deliver entries again. What was posted meanwhile is not posted twice."""
    if not letters and not everything and reason is None:
        raise typer.BadParameter("name entries, a --reason, or --all")

    async def run(known: DeadLetters) -> int:
        if letters:
            found: list[DeadLetter] = []
            for letter in letters:
                one = await known.find(letter)
                if one is None:
                    raise CannotStart(f"there is no dead letter {letter}")
                found.append(one)
            return await known.redrive(found)
        return await known.redrive(await known.list(reason=reason, most=1_000_000))

    done = _with(run)
    if as_json:
        show_json(Redriven(redriven=done))
    else:
        typer.echo(f"{done} delivered again")


def _with(work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    async def run() -> T:
        async with open_redis() as redis:
            return await work(DeadLetters(redis, (await all_models(redis, None)).pools))

    return asyncio.run(run())
