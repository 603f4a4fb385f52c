"""Connections to Postgres for bulk work: asyncpg's own, from SQLAlchemy's pool."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from contracts.environment import asyncpg_url


def create_engine(database_url: str, *, pool_size: int = 4) -> AsyncEngine:
    """Return an engine on `postgresql://...`. Connects on first use; no statement runs longer than a minute."""
    return create_async_engine(
        asyncpg_url(database_url),
        pool_size=pool_size,
        pool_pre_ping=True,
        connect_args={"timeout": 5, "command_timeout": 60},
    )


@asynccontextmanager
async def driver_connection(engine: AsyncEngine) -> AsyncIterator[asyncpg.Connection]:
    """Lend the pool's asyncpg connection, without a transaction; one that broke is not lent again."""
    async with engine.connect() as conn:
        raw = (await conn.get_raw_connection()).driver_connection
        assert isinstance(raw, asyncpg.Connection)
        try:
            yield raw
        finally:
            if raw.is_closed():
                await conn.invalidate()
