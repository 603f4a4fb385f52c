"""`pdgate init`: what a deployment needs once, before its services start. Safe to run again."""

import asyncio
import os
import secrets
from typing import Annotated

import msgspec
import typer

from contracts.catalog import read_catalog
from migrations.upgrade import upgrade
from pdgate.connection import data_folder, database_url, redis_url
from pdgate.envfile import PEER_TOKEN, read_env, write_env
from pdgate.layout import catalog_file, layout_of
from pdgate.output import AsJson, show
from pdgate.tenancy import prepare_tenants, read_in_prices


class FirstKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key, and the variable that holds it."""

    variable: str
    value: str


def init(
    demo: Annotated[bool, typer.Option(help="Make a demo organisation and key too.")] = False,
    with_keys: Annotated[
        bool, typer.Option("--keys/--no-keys", help="Make keys at all; without, nothing is to be kept.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Migrate the database at DATABASE_URL, read in the catalogue's prices and make the first operator key.

    Makes a PDGATE_PEER_TOKEN too, unless the environment has one: give it to every gateway, scheduler and worker as
    GATEWAY_PEER_TOKEN, SCHEDULER_PEER_TOKEN and WORKER_PEER_TOKEN.

    Keys are kept in the data folder (PDGATE_DATA), so that running it again makes no new ones. With --no-keys there
    is nothing to keep, so it may run anywhere, before each upgrade for instance.
    """
    upgrade(database_url())
    if not with_keys:
        asyncio.run(read_in_prices(database_url=database_url(), catalog=read_catalog(catalog_file())))
        return
    env_file = layout_of(data_folder()).env_file
    known = read_env(env_file)
    keys = asyncio.run(
        prepare_tenants(
            database_url=database_url(),
            redis_url=redis_url(),
            catalog=read_catalog(catalog_file()),
            known=known,
            demo=demo,
        )
    )
    made = {"PDGATE_ADMIN_KEY": keys.admin, **({"PDGATE_API_KEY": keys.demo} if keys.demo else {})}
    if PEER_TOKEN not in os.environ:
        made[PEER_TOKEN] = known.get(PEER_TOKEN) or secrets.token_urlsafe(32)
    env_file.parent.mkdir(parents=True, exist_ok=True)
    write_env(env_file, {**known, **made})
    show([FirstKey(variable=name, value=value) for name, value in made.items()], as_json=as_json)
