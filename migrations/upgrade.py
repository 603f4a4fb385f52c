"""Bring a database to the newest schema, from Python."""

import asyncio
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from contracts.environment import asyncpg_url

_LOCK = 0x70646761_74650001  # advisory lock: one upgrade at a time


def alembic_config() -> Config:
    """Return alembic's configuration, wherever the package is installed."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    return config


def upgrade(database_url: str) -> None:
    """Run all missing migrations; safe to call from several processes. Not from inside an event loop."""
    asyncio.run(upgrade_in_loop(database_url))


async def upgrade_in_loop(database_url: str) -> None:
    """Run all missing migrations; blocks the loop while one statement runs."""
    engine = create_async_engine(asyncpg_url(database_url), poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            await connection.run_sync(_upgrade)
    finally:
        await engine.dispose()


def _upgrade(connection: Connection) -> None:
    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
