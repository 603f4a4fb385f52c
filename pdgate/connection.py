"""How the command line reaches a running stack: the environment first, then the stack's own file."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from contracts.credentials import Credentials, certificates_of
from contracts.environment import asyncpg_url
from contracts.resp import redis_client
from pdgate.envfile import ADMIN_TOKEN, setting
from pdgate.layout import DEFAULT_DATA, layout_of
from pdgate.preflight import CannotStart


def data_folder() -> Path:
    """Return the data folder in use: PDGATE_DATA, or `.pdgate` here."""
    return Path(os.environ.get("PDGATE_DATA") or DEFAULT_DATA)


def _found(name: str) -> str:
    env_file = layout_of(data_folder()).env_file
    value = setting(name, env_file)
    if value is None:
        raise CannotStart(f"{name} is not set and {env_file} does not exist: start a stack with `pdgate up`")
    return value


def database_url() -> str:
    """Return the URL of PostgreSQL. Raises CannotStart when there is none."""
    return _found("DATABASE_URL")


def redis_url() -> str:
    """Return the URL of Valkey or Redis. Raises CannotStart when there is none."""
    return _found("REDIS_URL")


def gateway_url() -> str:
    """Return the URL of the gateway. Raises CannotStart when there is none."""
    return _found("PDGATE_URL")


def portal_url() -> str:
    """Return the URL of the portal. Raises CannotStart when there is none."""
    return _found("PDGATE_PORTAL_URL")


def admin_key() -> str:
    """Return the operators' key for the admin API. Raises CannotStart when there is none."""
    return _found("PDGATE_ADMIN_KEY")


def admin_token() -> str:
    """Return the token of billing's Admin service. Raises CannotStart when there is none."""
    return _found(ADMIN_TOKEN)


def billing_credentials() -> Credentials:
    """Return what billing's Admin service is shown: the token, and certificates where PDGATE_TLS_CA and so on are set.

    Raises:
        CannotStart: there is no token.
        SettingsError: a file of the certificates is missing or bad.
    """
    files = {word: os.environ.get(f"PDGATE_TLS_{word.upper()}", "") for word in ("ca", "cert", "key", "name")}
    return Credentials(token=admin_token(), certificates=certificates_of("PDGATE_", **files))


@asynccontextmanager
async def open_database() -> AsyncIterator[AsyncEngine]:
    """Give an engine on the stack's database."""
    engine = create_async_engine(asyncpg_url(database_url()))
    try:
        yield engine
    finally:
        await engine.dispose()


@asynccontextmanager
async def open_redis() -> AsyncIterator[Redis]:
    """Give a client of the stack's Valkey."""
    client = redis_client(redis_url())
    try:
        yield client
    finally:
        await client.aclose()
