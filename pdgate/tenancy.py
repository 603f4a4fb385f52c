"""The first organisations and keys of an installation, and how a restart finds them again."""

from collections.abc import Mapping

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing.prices import sync_catalog
from contracts.catalog import Catalog
from contracts.environment import asyncpg_url
from contracts.resp import redis_client
from gateway.ids import hash_key
from gateway.limits import NO_LIMITS, Limits
from gateway.portal.links import Links
from gateway.portal.people import People
from gateway.tenants import Tenants, publish_key_state

DEMO_CONCURRENCY = 256
OPERATOR_EMAIL = "operator@localhost"
_DEMO, _OPERATORS = "Demo", "Operators"


class FirstKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Plaintext keys; `demo` is None without the demo tenant. `sign_in`: token of the operator's one-time link."""

    admin: str
    demo: str | None
    sign_in: str


async def read_in_prices(*, database_url: str, catalog: Catalog) -> None:
    """Bring the catalogue's prices into the price book of a migrated database."""
    engine = create_async_engine(asyncpg_url(database_url))
    try:
        async with engine.begin() as connection:
            await sync_catalog(connection, catalog)
    finally:
        await engine.dispose()


async def prepare_tenants(
    *, database_url: str, redis_url: str, catalog: Catalog, known: Mapping[str, str], demo: bool
) -> FirstKeys:
    """Bring the catalogue's prices into the price book, and return keys that work.

    Args:
        database_url: migrated database.
        redis_url: where the reserve script finds the keys' states.
        catalog: models and prices.
        known: variables of the last run, with its plaintext keys. Only hashes are stored, so a key
            that is not among them is replaced by a new one.
        demo: whether there is to be a demo tenant.
    """
    engine = create_async_engine(asyncpg_url(database_url))
    redis = redis_client(redis_url)
    try:
        async with engine.begin() as connection:
            await sync_catalog(connection, catalog)
        keys = _Keys(Tenants(engine), redis)
        admin = await keys.find_or_create(_OPERATORS, known.get("PDGATE_ADMIN_KEY"), is_admin=True)
        sign_in = await _operators_link(engine, hash_key(admin))
        if not demo:
            return FirstKeys(admin=admin, demo=None, sign_in=sign_in)
        limits = Limits(concurrent_requests=DEMO_CONCURRENCY)
        demo_key = await keys.find_or_create(_DEMO, known.get("PDGATE_API_KEY"), is_demo=True, limits=limits)
        return FirstKeys(admin=admin, demo=demo_key, sign_in=sign_in)
    finally:
        await redis.aclose()
        await engine.dispose()


async def _operators_link(engine: AsyncEngine, admin_key: bytes) -> str:
    """Return a new sign-in of the first operator, who is made if there is none. The admin key is the fleet's."""
    tenants, people = Tenants(engine), People(engine)
    key = await tenants.find_by_hash(admin_key)
    if key is not None:
        await tenants.set_runs_fleet(key.organisation_id)
    operator = await people.first_operator() or await people.create_operator(OPERATOR_EMAIL, actor="pdgate up")
    _, token = await Links(engine).sign_in(operator.id, actor="pdgate up")
    return token


class _Keys:
    """Finds or makes the key of an organisation that has one project and one key."""

    def __init__(self, tenants: Tenants, redis: Redis) -> None:
        self._tenants = tenants
        self._redis = redis

    async def find_or_create(
        self,
        name: str,
        plaintext: str | None,
        *,
        is_admin: bool = False,
        is_demo: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> str:
        key = await self._tenants.find_by_hash(hash_key(plaintext)) if plaintext else None
        if plaintext is None or key is None or key.state != "active" or key.is_admin != is_admin:
            organisation = await self._tenants.find_organisation_by_name(name)
            if organisation is None:
                organisation = await self._tenants.create_organisation(name, is_demo=is_demo)
            projects = await self._tenants.list_projects(organisation.id)
            project = projects[0] if projects else await self._tenants.create_project(organisation.id, "Default")
            key, plaintext = await self._tenants.create_key(
                organisation.id, project.id, name=f"pdgate up ({name})", is_admin=is_admin, limits=limits
            )
        await publish_key_state(self._redis, key)
        return plaintext
