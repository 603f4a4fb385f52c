"""Reading: as one tenant, under row-level security, and plainly, where a query knows whom it is about.

Queries filter by organisation; `tenant_read` is for the day when one does not. Inside, PostgreSQL shows rows of the
one organisation and nothing else (migrations/versions/0008_row_security.py).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

TENANT_ROLE: Final = "pdgate_tenant"
_BECOME: Final = sa.text("SELECT set_config('role', :role, true), set_config('pdgate.tenant', :tenant, true)")


@asynccontextmanager
async def tenant_read(engine: AsyncEngine, tenant: str) -> AsyncIterator[AsyncConnection]:
    """Give a transaction that sees the rows of `tenant` only. It cannot write."""
    async with engine.begin() as db:
        await db.execute(_BECOME, {"role": TENANT_ROLE, "tenant": tenant})
        yield db


@asynccontextmanager
async def plain_read(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Give a connection for single statements: each is a transaction of its own, with no word before or after it."""
    async with engine.connect() as db:
        yield await db.execution_options(isolation_level="AUTOCOMMIT")
