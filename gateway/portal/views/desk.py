"""What every view works with: who is let in, what is read, and how it is shown."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from litestar import Response
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts.catalog import Catalog
from contracts.errors import ServingError
from contracts.rating import Price
from contracts.series import Point, read_series
from gateway.fleet import Fleet
from gateway.lookup import Lookup
from gateway.portal.door import AnyRequest, Door, Visit
from gateway.portal.figures import NOTHING
from gateway.portal.pages import Pages
from gateway.portal.roles import Right
from gateway.prices import Prices
from gateway.tenant_read import tenant_read
from gateway.tenants import ApiKey, Project, Tenants


class Desk:
    """The parts that views share. Handlers stay thin: enter, read, show."""

    def __init__(
        self,
        door: Door,
        pages: Pages,
        engine: AsyncEngine,
        redis: Redis,
        catalog: Catalog,
        *,
        lookup: Lookup,
        fleet: Fleet,
        prices: Prices,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.door = door
        self.pages = pages
        self.engine = engine
        self.redis = redis
        self.catalog = catalog
        self.tenants = Tenants(engine)
        self.lookup = lookup
        self.fleet = fleet
        self.prices = prices
        self.now_s = now_s

    async def enter(self, request: AnyRequest, right: Right) -> Visit:
        """Return who makes a request, if they have the right to."""
        return await self.door.enter(request, right)

    def reading(self, visit: Visit) -> AbstractAsyncContextManager[AsyncConnection]:
        """Return a connection that reads as the visit's organisation: the database shows it no other's rows."""
        return tenant_read(self.engine, visit.tenant)

    @asynccontextmanager
    async def reading_across_tenants(self) -> AsyncIterator[AsyncConnection]:
        """Return a connection for pages of operators."""
        async with self.engine.connect() as db:
            yield db

    async def course(self, pool: str, hours: float) -> Sequence[Point]:
        """Return the points of a pool's last hours, the oldest first; none while Redis is away."""
        try:
            return await read_series(self.redis, pool, since_unix_ms=int((self.now_s() - hours * 3600) * 1000))
        except (RedisError, OSError):
            return []

    def show(self, request: AnyRequest, template: str, visit: Visit, **values: Any) -> Response[str]:
        """Return a page, with the menu of what this role may see."""
        return self.pages.page(
            request,
            f"views/{template}.html",
            visit=visit,
            currency=self.catalog.currency,
            base_url=self.door.transport.origin(request.scope),
            **values,
        )

    def any_model(self) -> str:
        """Return a model for an example."""
        return next(iter(self.catalog.models), "MODEL")

    async def price_of(self, model: str, tenant: str) -> Price | None:
        """Return what an organisation pays for a model now."""
        try:
            return await self.prices.of(model, tenant, int(self.now_s() * 1000), "default")
        except ServingError:
            return None

    async def names(self, tenant: str) -> "Names":
        """Return the names of an organisation's projects and keys."""
        return Names(await self.tenants.list_projects(tenant), await self.tenants.list_keys(tenant))


class Names:
    """Projects and keys of one organisation by id: ids mean nothing to people."""

    def __init__(self, projects: Sequence[Project], keys: Sequence[ApiKey]) -> None:
        self.projects: Mapping[str, str] = {one.id: one.name for one in projects}
        self.keys: Mapping[str, str] = {one.id: one.name or one.prefix for one in keys}

    def of(self, dimension: str, label: str | None) -> str:
        """Return what a value of a dimension is called."""
        known = {"project": self.projects, "key": self.keys}.get(dimension, {})
        return known.get(label or "", label or NOTHING)
