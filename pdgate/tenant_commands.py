"""`pdgate orgs`, and `pdgate models suspend` and `resume`."""

import asyncio
import datetime as dt
import getpass
from typing import Annotated

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.bounds import Bounds
from gateway.changes import Announcer, HoldBook
from gateway.holds import READ_ONLY, SUSPENDED, Hold
from gateway.limits import Limits
from gateway.scopes import NO_SCOPES, Scopes, WrongNetwork, check_scopes
from gateway.tenants import NoSuchTenant, Organisation, Tenants
from pdgate.connection import open_database, open_redis
from pdgate.output import AsJson, show
from pdgate.preflight import CannotStart
from pdgate.serving_commands import all_models, models

orgs = typer.Typer(help="Organisations: the tenants that pay.", no_args_is_help=True)

OrgArgument = Annotated[str, typer.Argument(help="Id or name of the organisation.")]
Project = Annotated[str, typer.Option(help="Id of one of its projects: only that.")]
Drain = Annotated[bool, typer.Option("--drain", help="Let running answers come to their end.")]
Reason = Annotated[str, typer.Option(help="Why, for the record.")]


class OrganisationRow(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation as it is printed."""

    id: str
    name: str
    demo: bool
    created: str


class BoundsRow(msgspec.Struct, frozen=True, kw_only=True):
    """What binds an organisation, a project or a key, as it is printed."""

    id: str
    limits: Limits
    scopes: Scopes
    keys: int  # that it binds


class _StrictLimits(Limits, frozen=True, forbid_unknown_fields=True):
    """A misspelt limit would be none."""


class _StrictScopes(Scopes, frozen=True, forbid_unknown_fields=True):
    """A misspelt scope would be none."""


class HoldRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is held, as it is printed. `mode` is empty when it is free again."""

    kind: str
    id: str
    mode: str
    drain: bool
    reason: str
    actor: str


@orgs.command("create")
def create_org(
    name: Annotated[str, typer.Argument(help="Name of the new organisation.")],
    as_json: AsJson = False,
) -> None:
    """Create an organisation with one project."""

    async def run() -> Organisation:
        async with open_database() as database:
            tenants = Tenants(database)
            if await tenants.find_organisation_by_name(name) is not None:
                raise CannotStart(f"there is an organisation {name!r} already")
            organisation = await tenants.create_organisation(name)
            await tenants.create_project(organisation.id, "Default")
            return organisation

    show([_organisation_row(asyncio.run(run()))], as_json=as_json)


@orgs.command("list")
def list_orgs(as_json: AsJson = False) -> None:
    """List all organisations, oldest first."""

    async def run() -> list[OrganisationRow]:
        async with open_database() as database:
            return [_organisation_row(found) for found in await Tenants(database).list_organisations()]

    show(asyncio.run(run()), as_json=as_json)


@orgs.command("set-limits")
def set_org_limits(
    org: OrgArgument,
    limits: Annotated[str, typer.Option(help="Limits of all its keys together, JSON, in place of the old.")],
    as_json: AsJson = False,
) -> None:
    """Set the limits of an organisation, such as '{"tokens_per_minute": 90000, "concurrent_requests": 64}'."""
    wanted, _ = read_bounds(limits, "{}")

    async def run() -> BoundsRow:
        async with open_database() as database:
            organisation = await find_org(Tenants(database), org)
            bound = await Bounds(database).set_organisation(organisation.id, limits=wanted, actor=operator())
            await publish(database)
            return BoundsRow(id=organisation.id, limits=wanted, scopes=NO_SCOPES, keys=len(bound))

    show([asyncio.run(run())], as_json=as_json)


@orgs.command("set-project")
def set_project(
    org: OrgArgument,
    project: Annotated[str, typer.Argument(help="Id of the project: proj_…")],
    limits: Annotated[str, typer.Option(help="Limits of all its keys together, JSON, in place of the old.")] = "{}",
    scopes: Annotated[str, typer.Option(help="Scopes that bind all its keys, JSON, in place of the old.")] = "{}",
    as_json: AsJson = False,
) -> None:
    """Set the limits and scopes of a project, such as '{"tokens_per_minute": 90000}' and '{"models": ["smollm2"]}'."""
    wanted = read_bounds(limits, scopes)

    async def run() -> BoundsRow:
        async with open_database() as database:
            organisation = await find_org(Tenants(database), org)
            try:
                bound = await Bounds(database).set_project(
                    organisation.id, project, limits=wanted[0], scopes=wanted[1], actor=operator()
                )
            except NoSuchTenant as error:
                raise CannotStart(str(error)) from None
            await publish(database)
            return BoundsRow(id=project, limits=wanted[0], scopes=wanted[1], keys=len(bound))

    show([asyncio.run(run())], as_json=as_json)


@orgs.command("suspend")
def suspend_org(
    org: OrgArgument, project: Project = "", drain: Drain = False, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Refuse every call of an organisation or project, on every gateway within the second. Reversible."""
    show([_hold(org, project, SUSPENDED, drain=drain, reason=reason)], as_json=as_json)


@orgs.command("read-only")
def set_org_read_only(
    org: OrgArgument, project: Project = "", drain: Drain = False, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Refuse calls that would run on a worker; usage and past requests can still be read. Reversible."""
    show([_hold(org, project, READ_ONLY, drain=drain, reason=reason)], as_json=as_json)


@orgs.command("resume")
def resume_org(org: OrgArgument, project: Project = "", as_json: AsJson = False) -> None:
    """Undo `suspend` or `read-only`."""

    async def run() -> HoldRow:
        async with open_database() as database:
            tenant, kind, name = await _target(Tenants(database), org, project)
            return await _lift(database, kind, name, org=tenant)

    show([asyncio.run(run())], as_json=as_json)


@orgs.command("held")
def list_held(as_json: AsJson = False) -> None:
    """List the organisations, projects and models that are suspended or may only read."""

    async def run() -> list[HoldRow]:
        async with open_database() as database:
            return [_hold_row(found) for found in await HoldBook(database).all()]

    show(asyncio.run(run()), as_json=as_json, empty="nothing is held")


@models.command("suspend")
def suspend_model(
    model: Annotated[str, typer.Argument(help="Public name of the model.")],
    drain: Drain = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Refuse every request for a model, on every gateway within the second. Reversible."""

    async def run() -> HoldRow:
        async with open_redis() as redis:
            if model not in (await all_models(redis, None)).models:
                raise CannotStart(f"there is no model {model!r}: see `pdgate models list`")
        async with open_database() as database:
            hold = Hold(kind="model", id=model, mode=SUSPENDED, drain=drain, reason=reason, actor=operator())
            return await _put(database, hold, org=None)

    show([asyncio.run(run())], as_json=as_json)


@models.command("resume")
def resume_model(
    model: Annotated[str, typer.Argument(help="Public name of the model.")], as_json: AsJson = False
) -> None:
    """Undo `suspend`."""

    async def run() -> HoldRow:
        async with open_database() as database:
            return await _lift(database, "model", model, org=None)

    show([asyncio.run(run())], as_json=as_json)


def operator() -> str:
    """Return who runs the command, for the record of changes."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):
        return "cli"


def read_bounds(limits: str, scopes: str) -> tuple[Limits, Scopes]:
    """Return limits and scopes from JSON. Raises CannotStart."""
    try:
        return msgspec.json.decode(limits, type=_StrictLimits), check_scopes(
            msgspec.json.decode(scopes, type=_StrictScopes)
        )
    except (msgspec.DecodeError, WrongNetwork) as error:
        raise CannotStart(str(error)) from None


async def find_org(tenants: Tenants, org: str) -> Organisation:
    """Return the organisation of an id or a name. Raises CannotStart."""
    for organisation in await tenants.list_organisations():
        if org in (organisation.id, organisation.name):
            return organisation
    raise CannotStart(f"there is no organisation {org!r}: see `pdgate orgs list`")


async def _target(tenants: Tenants, org: str, project: str) -> tuple[str, str, str]:
    organisation = await find_org(tenants, org)
    if not project:
        return organisation.id, "org", organisation.id
    if project not in {found.id for found in await tenants.list_projects(organisation.id)}:
        raise CannotStart(f"{org!r} has no project {project!r}")
    return organisation.id, "project", project


def _hold(org: str, project: str, mode: str, *, drain: bool, reason: str) -> HoldRow:
    async def run() -> HoldRow:
        async with open_database() as database:
            tenant, kind, name = await _target(Tenants(database), org, project)
            hold = Hold(kind=kind, id=name, mode=mode, drain=drain, reason=reason, actor=operator())
            return await _put(database, hold, org=tenant)

    return asyncio.run(run())


async def _put(database: AsyncEngine, hold: Hold, *, org: str | None) -> HoldRow:
    await HoldBook(database).put(hold, org=org)
    await publish(database)
    return _hold_row(hold)


async def _lift(database: AsyncEngine, kind: str, name: str, *, org: str | None) -> HoldRow:
    if not await HoldBook(database).lift(kind, name, org=org, actor=operator()):
        raise CannotStart(f"{name!r} is not held: see `pdgate orgs held`")
    await publish(database)
    return HoldRow(kind=kind, id=name, mode="", drain=False, reason="", actor=operator())


async def publish(database: AsyncEngine) -> None:
    """Make every gateway know what was changed."""
    async with open_redis() as redis:
        await Announcer(database, redis).publish_pending()


def _hold_row(hold: Hold) -> HoldRow:
    return HoldRow(kind=hold.kind, id=hold.id, mode=hold.mode, drain=hold.drain, reason=hold.reason, actor=hold.actor)


def _organisation_row(organisation: Organisation) -> OrganisationRow:
    return OrganisationRow(
        id=organisation.id, name=organisation.name, demo=organisation.is_demo, created=when(organisation.created_at)
    )


def when(moment: dt.datetime) -> str:
    """Return a time as it is printed."""
    return moment.astimezone(dt.UTC).isoformat(timespec="seconds")
