"""A gateway per test, with people."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from admin_rig import TOKEN, admin_client
from portal_rig import PortalRig

from billing.admin import Admin, admin_server
from billing.budgets import Budgets
from contracts import keys
from contracts.catalog import Catalog
from contracts.credentials import Credentials
from tests.gateway.gateway_rig import running_rig


@pytest.fixture
async def portal(
    redis_url: str, database_url: str, catalog_file: Path, catalog: Catalog, models_dir: Path, tmp_path: Path
) -> AsyncIterator[PortalRig]:
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        catalog=catalog,
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
    ) as running:
        rig = PortalRig(running)
        yield rig
        await rig.close()


@pytest.fixture
async def operator(portal: PortalRig) -> httpx.AsyncClient:
    """A client with a key of the organisation that runs the fleet."""
    return await admin_client(portal, fleet=True)


@pytest.fixture
async def admin(portal: PortalRig) -> httpx.AsyncClient:
    """A client with an admin key of the rig's organisation."""
    return await admin_client(portal, fleet=False)


@pytest.fixture
async def billing(portal: PortalRig) -> AsyncIterator[None]:
    """Billing's Admin service, where the gateway finds it."""
    gateway = portal.rig.gateway
    serving = Admin(gateway.engine, Budgets(gateway.engine, gateway.redis), currency="EUR")
    gateway.admin.money._money._credentials = Credentials(token=TOKEN)
    async with admin_server(serving, listen="127.0.0.1:0", token=TOKEN) as address:
        await portal.rig.redis.set(keys.BILLING_ADMIN, address)
        yield
