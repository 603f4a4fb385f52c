"""`pdgate credits` and `pdgate budgets`."""

import asyncio
import datetime as dt
import uuid
from typing import Annotated

import msgspec
import typer

from billing.budgets import budgets_of, spent_in
from billing.credits import grants_of
from billing.periods import month_of
from billing.profiles import find_profile
from contracts.v1 import billing_pb2 as pb
from pdgate.billing_admin import call, nano_of, who
from pdgate.connection import open_database
from pdgate.output import AsJson, show
from pdgate.usage import money

credits_app = typer.Typer(help="Credit: grants with priority and expiry, used before invoices.", no_args_is_help=True)
budgets_app = typer.Typer(help="Monthly budgets of organisations, projects and keys.", no_args_is_help=True)

Org = Annotated[str, typer.Option("--org", help="Id of the organisation.")]
Amount = Annotated[str, typer.Argument(help="Currency units, for example 25.00.")]


class GrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """A grant as it is printed: currency units."""

    id: str
    kind: str
    amount: str
    left: str
    priority: int
    granted: str
    expires: str | None
    note: str


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True):
    """A budget as it is printed: currency units; `spent` of the running month."""

    scope: str
    scope_id: str
    amount: str
    spent: str
    hard: bool
    thresholds: tuple[int, ...]
    resets: str


@credits_app.command("grant")
def give(
    amount: Amount,
    org: Org,
    promotional: Annotated[bool, typer.Option(help="Given, not paid for.")] = False,
    key: Annotated[str, typer.Option(help="Idempotency key: the same one again grants nothing.")] = "",
    priority: Annotated[int, typer.Option(help="Lower is used first.")] = 100,
    expires: Annotated[dt.datetime | None, typer.Option(help="UTC moment after which what is left is lost.")] = None,
    note: Annotated[str, typer.Option(help="Why.")] = "",
    as_json: AsJson = False,
) -> None:
    """Give an organisation credit."""
    made = call(
        "Grant",
        pb.NewGrant(
            organisation=org,
            kind="promotional" if promotional else "paid",
            amount=nano_of(amount, decimals=2),
            idempotency=key or str(uuid.uuid4()),
            priority=priority,
            expires_ms=0 if expires is None else int(expires.replace(tzinfo=dt.UTC).timestamp() * 1000),
            note=note,
            by=who(),
        ),
    )
    _show_grants(org, as_json=as_json, only=made.id)


@credits_app.command("list")
def list_grants(org: Org, as_json: AsJson = False) -> None:
    """List an organisation's grants in the order in which they are used."""
    _show_grants(org, as_json=as_json)


def _show_grants(org: str, *, as_json: bool, only: str | None = None) -> None:
    async def run() -> list[GrantRow]:
        async with open_database() as database, database.begin() as conn:
            return [
                GrantRow(
                    id=str(one.id),
                    kind=one.kind,
                    amount=money(one.amount),
                    left=money(one.left),
                    priority=one.priority,
                    granted=one.granted_at.isoformat(timespec="seconds"),
                    expires=None if one.expires_at is None else one.expires_at.isoformat(timespec="seconds"),
                    note=one.note,
                )
                for one in await grants_of(conn, org)
                if only in (None, str(one.id))
            ]

    show(asyncio.run(run()), as_json=as_json, empty="no credit")


@budgets_app.command("set")
def set_one(
    amount: Amount,
    org: Org,
    project: Annotated[str, typer.Option(help="Of this project instead of the organisation.")] = "",
    key: Annotated[str, typer.Option(help="Of this key instead of the organisation.")] = "",
    soft: Annotated[bool, typer.Option(help="Only tell, never refuse.")] = False,
    thresholds: Annotated[str, typer.Option(help="Percent at which to tell.")] = "50,80,100",
    as_json: AsJson = False,
) -> None:
    """Set a monthly budget."""
    scope, scope_id = _scope(org, project, key)
    request = pb.Budget(
        organisation=org,
        scope=scope,
        scope_id=scope_id,
        amount=nano_of(amount),
        soft=soft,
        thresholds=[int(one) for one in thresholds.split(",") if one],
        by=who(),
    )
    call("SetBudget", request)
    list_budgets(org, as_json=as_json)


@budgets_app.command("remove")
def remove(
    org: Org,
    project: Annotated[str, typer.Option(help="Of this project.")] = "",
    key: Annotated[str, typer.Option(help="Of this key.")] = "",
) -> None:
    """Remove a budget."""
    scope, scope_id = _scope(org, project, key)
    done = call("RemoveBudget", pb.BudgetScope(organisation=org, scope=scope, scope_id=scope_id))
    typer.echo("removed" if done.changed else "there was none")


@budgets_app.command("list")
def list_budgets(org: Org, as_json: AsJson = False) -> None:
    """List an organisation's budgets and what is spent of them this month."""

    async def run() -> list[BudgetRow]:
        async with open_database() as database, database.begin() as conn:
            zone = (await find_profile(conn, org)).time_zone
            period = month_of(dt.datetime.now(dt.UTC), zone)
            return [
                BudgetRow(
                    scope=one.scope,
                    scope_id=one.scope_id,
                    amount=money(one.amount),
                    spent=money(await spent_in(conn, org, scope=one.scope, scope_id=one.scope_id, period=period)),
                    hard=one.hard,
                    thresholds=one.thresholds,
                    resets=period.end.isoformat(timespec="seconds"),
                )
                for one in await budgets_of(conn, org)
            ]

    show(asyncio.run(run()), as_json=as_json, empty="no budgets")


def _scope(org: str, project: str, key: str) -> tuple[str, str]:
    if project and key:
        raise typer.BadParameter("name a project or a key, not both")
    if key:
        return "key", key
    return ("project", project) if project else ("org", org)
