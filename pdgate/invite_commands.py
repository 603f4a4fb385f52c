"""`pdgate orgs invite`: one-time links into the portal."""

import asyncio
import datetime as dt
from typing import Annotated

import msgspec
import typer

from contracts.errors import BadRequest
from gateway.portal.links import Link, Links
from gateway.portal.people import People
from gateway.portal.roles import Role
from gateway.tenants import Tenants
from pdgate.connection import open_database, portal_url
from pdgate.output import AsJson, show
from pdgate.preflight import CannotStart
from pdgate.tenancy import OPERATOR_EMAIL
from pdgate.tenant_commands import find_org, operator, when


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A link as it is printed, once."""

    kind: str
    role: str
    expires: str
    url: str


def invite(
    email: Annotated[str, typer.Argument(help="Whom; without it: a sign-in for the first operator.")] = "",
    org: Annotated[str, typer.Option(help="Id or name of the organisation; without it: an operator.")] = "",
    role: Annotated[Role, typer.Option(help="Role in the organisation.")] = Role.OWNER,
    as_json: AsJson = False,
) -> None:
    """Make a link that works once and pass it on yourself: nothing is sent."""
    if org and not email:
        raise typer.BadParameter("an invite to an organisation needs an e-mail address")
    if org and role is Role.OPERATOR:
        raise typer.BadParameter("an operator belongs to no organisation: leave --org away")

    async def run() -> tuple[Link, str]:
        async with open_database() as database:
            links = Links(database)
            if not email:
                people = People(database)
                first = await people.first_operator()
                who = first or await people.create_operator(OPERATOR_EMAIL, actor=operator())
                return await links.sign_in(who.id, actor=operator())
            tenant = (await find_org(Tenants(database), org)).id if org else None
            try:
                return await links.invite(tenant, email, role if org else Role.OPERATOR, actor=operator())
            except BadRequest as error:
                raise CannotStart(error.message) from None

    made, token = asyncio.run(run())
    expires: dt.datetime = made.expires_at
    row = LinkRow(
        kind=made.kind,
        role=made.role or Role.OPERATOR,
        expires=when(expires),
        url=f"{portal_url()}/invite/{token}",
    )
    show([row], as_json=as_json)
