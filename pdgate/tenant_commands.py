"""`pdgate orgs` and `pdgate keys`."""

import asyncio
import datetime as dt
from typing import Annotated

import msgspec
import typer

from gateway.limits import Limits
from gateway.tenants import ApiKey, NoSuchTenant, Organisation, Tenants, publish_key_state
from pdgate.connection import open_database, open_redis
from pdgate.output import AsJson, show, show_json
from pdgate.preflight import CannotStart

orgs = typer.Typer(help="Organisations: the tenants that pay.", no_args_is_help=True)
keys = typer.Typer(help="API keys of an organisation.", no_args_is_help=True)

Org = Annotated[str, typer.Option("--org", help="Id or name of the organisation.")]


class OrganisationRow(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation as it is printed."""

    id: str
    name: str
    demo: bool
    created: str


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is printed: never the secret."""

    id: str
    name: str
    prefix: str
    state: str
    admin: bool
    organisation: str
    project: str
    created: str
    expires: str | None


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A fresh key with its secret, which is shown once."""

    id: str
    key: str
    organisation: str
    project: str


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


@keys.command("create")
def create_key(
    org: Org,
    name: Annotated[str, typer.Option(help="Name of the key, shown in lists.")] = "default",
    project: Annotated[str, typer.Option(help="Id of the project; the organisation's first one if absent.")] = "",
    concurrent: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Most requests a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Most prompt and generated tokens.")] = None,
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="Days until the key stops to work.")] = None,
    admin: Annotated[bool, typer.Option(help="May use the admin API.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create a key and print its secret, which is stored nowhere."""
    limits = Limits(
        concurrent_requests=concurrent, requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute
    )
    expires = dt.datetime.now(dt.UTC) + dt.timedelta(days=expires_in_days) if expires_in_days else None

    async def run() -> NewKey:
        async with open_database() as database, open_redis() as redis:
            tenants = Tenants(database)
            organisation = await _find(tenants, org)
            projects = await tenants.list_projects(organisation.id)
            chosen = project or (projects[0].id if projects else "")
            try:
                key, secret = await tenants.create_key(
                    organisation.id, chosen, name=name, is_admin=admin, limits=limits, expires_at=expires
                )
            except NoSuchTenant as error:
                raise CannotStart(str(error)) from None
            await publish_key_state(redis, key)
            return NewKey(id=key.id, key=secret, organisation=key.organisation_id, project=key.project_id)

    made = asyncio.run(run())
    if as_json:
        show_json(made)
    else:
        typer.echo(f"{made.id} in {made.organisation}, {made.project}. The secret is shown this once:\n{made.key}")


@keys.command("list")
def list_keys(org: Org, as_json: AsJson = False) -> None:
    """List an organisation's keys, revoked ones included."""

    async def run() -> list[KeyRow]:
        async with open_database() as database:
            tenants = Tenants(database)
            organisation = await _find(tenants, org)
            return [_key_row(key) for key in await tenants.list_keys(organisation.id)]

    show(asyncio.run(run()), as_json=as_json)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="Id of the key: key_…")],
    org: Org,
    as_json: AsJson = False,
) -> None:
    """Revoke a key for good: new requests are refused from the moment this returns."""

    async def run() -> KeyRow:
        async with open_database() as database, open_redis() as redis:
            tenants = Tenants(database)
            organisation = await _find(tenants, org)
            try:
                key = await tenants.revoke(organisation.id, key_id)
            except NoSuchTenant as error:
                raise CannotStart(str(error)) from None
            await publish_key_state(redis, key)
            return _key_row(key)

    show([asyncio.run(run())], as_json=as_json)


async def _find(tenants: Tenants, org: str) -> Organisation:
    for organisation in await tenants.list_organisations():
        if org in (organisation.id, organisation.name):
            return organisation
    raise CannotStart(f"there is no organisation {org!r}: see `pdgate orgs list`")


def _organisation_row(organisation: Organisation) -> OrganisationRow:
    return OrganisationRow(
        id=organisation.id, name=organisation.name, demo=organisation.is_demo, created=_when(organisation.created_at)
    )


def _key_row(key: ApiKey) -> KeyRow:
    return KeyRow(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        state=key.state,
        admin=key.is_admin,
        organisation=key.organisation_id,
        project=key.project_id,
        created=_when(key.created_at),
        expires=_when(key.expires_at) if key.expires_at else None,
    )


def _when(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="seconds")
