"""Alembic's entry point: gives it our tables and a connection.

The connection is the caller's (migrations.upgrade), or one to `-x url=...` or DATABASE_URL.
"""

import asyncio
import os
import re
from typing import Any, Literal

from alembic import context
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import billing.money_tables
import billing.tables
import gateway.batch_tables
import gateway.people_tables
import gateway.tables
import gateway.text_tables
from contracts.environment import SettingsError, asyncpg_url

METADATA = [gateway.tables.METADATA, billing.tables.METADATA]
SCHEMAS = {metadata.schema for metadata in METADATA}
PARTITION = re.compile(r"_\d{8}$")  # billing.partitions makes and drops these


def include_name(name: str | None, kind: str, parents: Any) -> bool:
    """Return whether alembic looks at what the database has under this name."""
    if kind == "schema":
        return name in SCHEMAS
    if kind == "table" and name is not None:
        return PARTITION.search(name) is None and parents.get("schema_name") in SCHEMAS
    return True


NamedKind = Literal[
    "schema", "table", "column", "index", "unique_constraint", "foreign_key_constraint", "check_constraint"
]


def include_object(_: Any, name: str | None, kind: NamedKind, __: bool, ___: Any) -> bool:  # noqa: FBT001 - alembic's
    """Return whether alembic compares this object: all but daily partitions."""
    return kind != "table" or name is None or PARTITION.search(name) is None


def run(connection: Connection) -> None:
    """Run the command's migrations on an open connection."""
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        include_schemas=True,
        include_name=include_name,
        include_object=include_object,
        compare_server_default=False,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


async def connect_and_run(url: str) -> None:
    """Run the command's migrations on a connection of its own."""
    engine = create_async_engine(asyncpg_url(url), poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
        await connection.commit()
    await engine.dispose()


def main() -> None:
    """Run with the caller's connection, or with one to the database named outside."""
    given = context.config.attributes.get("connection")
    if given is not None:
        run(given)
        return
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("DATABASE_URL")
    if not url:
        raise SettingsError("DATABASE_URL: must be set, or pass -x url=postgresql://...")
    asyncio.run(connect_and_run(url))


main()
