"""`pdgate orgs share-group`: organisations that find each other's cached prefixes, by consent of each."""

import asyncio
from typing import Annotated

import typer

from billing.sharing import Consent, members_of_across_tenants
from contracts.v1 import billing_pb2 as pb
from pdgate.billing_admin import call, who
from pdgate.connection import open_database
from pdgate.output import AsJson, show

sharing = typer.Typer(help="Share groups: cached prefixes in common, by consent of each.", no_args_is_help=True)

Group = Annotated[str, typer.Argument(help="Id of the group: share_…")]
Org = Annotated[str, typer.Option("--org", help="Id of the organisation.")]


@sharing.command("create")
def create(name: Annotated[str, typer.Argument(help="Name of the group.")]) -> None:
    """Create a group and print its id. It is in force once two organisations consent."""
    typer.echo(call("CreateShareGroup", pb.ShareGroup(name=name, by=who())).id)


@sharing.command("join")
def join(group: Group, org: Org) -> None:
    """Record that an organisation consents: others in the group may learn by timing what it prompts."""
    call("Consent", pb.ShareConsent(organisation=org, group_id=group, consents=True, by=who()))
    typer.echo(f"{org} consents to {group}")


@sharing.command("leave")
def leave(group: Group, org: Org) -> None:
    """Withdraw an organisation's consent."""
    call("Consent", pb.ShareConsent(organisation=org, group_id=group, consents=False, by=who()))
    typer.echo(f"{org} has left {group}")


@sharing.command("show")
def show_group(group: Group, as_json: AsJson = False) -> None:
    """List the last word of every organisation about a group."""

    async def run() -> list[Consent]:
        async with open_database() as database, database.begin() as conn:
            return list(await members_of_across_tenants(conn, group))

    show(asyncio.run(run()), as_json=as_json, empty="nobody has joined")
