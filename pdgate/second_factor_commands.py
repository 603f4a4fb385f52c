"""`pdgate orgs second-factor-off`: for somebody who lost phone and recovery codes, the only operator too."""

import asyncio
from typing import Annotated

import typer

from contracts.errors import BadRequest
from gateway.portal.factors import Factors
from gateway.portal.people import People
from gateway.portal.sessions import Sessions
from pdgate.connection import open_database, open_redis
from pdgate.preflight import CannotStart
from pdgate.tenant_commands import operator


def second_factor_off(email: Annotated[str, typer.Argument(help="Of the person. Make sure who asks.")]) -> None:
    """Take a person's second factor away and end their sessions; it is in the record of changes."""

    async def run() -> bool:
        async with open_database() as database, open_redis() as redis:
            try:
                who = await People(database).find_by_email(email)
            except BadRequest:
                who = None
            if who is None:
                raise CannotStart(f"nobody has the address {email!r}")
            gone = await Factors(database).remove(who.id, actor=operator())
            await Sessions(redis).end_all(who.id)
            return gone

    typer.echo(f"{email} signs in with the password alone" if asyncio.run(run()) else f"{email} had no second factor")
