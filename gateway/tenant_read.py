"""Reading as one tenant: row-level security, under queries that name their tenant anyway.

Queries filter by organisation; this is for the day when one does not. Inside, PostgreSQL shows rows of the
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
