"""No tenant sees another one's row: row-level security, table by table and query by query."""

import datetime as dt
import inspect
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from seeded_rows import INSTALLATIONS, TABLES, Seeds
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing import queries
from contracts.environment import asyncpg_url
from gateway.tenant_read import TENANT_ROLE, tenant_read

A, B = "org_a", "org_b"
EVERYBODYS = {"billing.slo_promise"}
OPERATORS = {
    "tenancy.model_name",
    "tenancy.model",
    "tenancy.second_factor",
    "tenancy.recovery_code",
    "billing.payment_customer",
    "billing.rerating",
    "billing.rerating_line",
    "billing.share_group",
    "tenancy.identity",
} | INSTALLATIONS


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(asyncpg_url(database_url))
    for tenant in (A, B):
        async with engine.begin() as db:
            await Seeds(tenant).plant(db)
    yield engine
    await engine.dispose()


async def test_every_table_is_behind_a_policy_or_out_of_reach(engine: AsyncEngine) -> None:
    query = sa.text(
        "SELECT n.nspname || '.' || c.relname AS name, c.relrowsecurity AS guarded,"
        f" has_any_column_privilege('{TENANT_ROLE}', c.oid, 'SELECT') AS seen,"
        f" has_table_privilege('{TENANT_ROLE}', c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE') AS written"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname IN ('tenancy', 'billing') AND c.relkind IN ('r', 'p', 'v', 'm')"
    )
    async with engine.begin() as db:
        rows = (await db.execute(query)).mappings().all()
    assert {row["name"] for row in rows if row["seen"] and not row["guarded"]} == EVERYBODYS
    assert not [row["name"] for row in rows if row["written"]]
    unseen = {row["name"] for row in rows if not row["seen"] and row["name"] in TABLES}
    assert unseen == OPERATORS


async def test_a_tenant_sees_its_own_rows_of_every_table_and_no_others(engine: AsyncEngine) -> None:
    for name in sorted(set(TABLES) - EVERYBODYS - OPERATORS):
        await _see_only_own(engine, TABLES[name])


async def _see_only_own(engine: AsyncEngine, table: sa.Table) -> None:
    async with engine.begin() as db:
        there = (await db.execute(sa.select(sa.func.count()).select_from(table))).scalar_one()
    shown = [sa.column(c.name) for c in table.c if c.name not in ("password_hash", "token_hash")]
    seen = {}
    query = sa.select(*shown).select_from(table)
    if table.name in ("price", "account"):  # rows of nobody are everybody's: list prices, the house's own accounts
        query = query.where(table.c.organisation.is_not(None))
    for tenant in (A, B):
        async with tenant_read(engine, tenant) as db:
            seen[tenant] = [tuple(map(str, row)) for row in await db.execute(query)]
    assert seen[A], table.name
    assert seen[B], table.name
    assert not set(seen[A]) & set(seen[B]), table.name
    assert len(seen[A]) + len(seen[B]) <= there
    if table.name in ("price", "account"):
        return
    async with tenant_read(engine, "") as db:
        assert not (await db.execute(sa.select(*shown).select_from(table))).all()


async def test_a_transaction_of_a_tenant_cannot_write_and_the_next_one_is_nobodys(engine: AsyncEngine) -> None:
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied"):
        async with tenant_read(engine, A) as db:
            await db.execute(sa.text("UPDATE tenancy.project SET name = 'x'"))
    async with engine.begin() as db:
        assert (await db.execute(sa.text("SELECT count(*) FROM tenancy.organisation"))).scalar_one() == 2
        assert (await db.execute(sa.text("SELECT current_setting('pdgate.tenant', true)"))).scalar_one() in ("", None)


READS_NO_ROWS_OF_ONE_TENANT = {
    "price_in_force",  # a list price is everybody's
    "current_prices",
    "outstanding",  # of an invoice that was found as its tenant
}


def _queries() -> list[str]:
    found = []
    for name in queries.__all__:
        function = getattr(queries, name)
        if inspect.iscoroutinefunction(function) and "conn" in inspect.signature(function).parameters:
            found.append(name)
    return found


async def test_no_query_of_billing_gives_one_tenant_anything_of_another(engine: AsyncEngine) -> None:
    """Asked by A about B: nothing. So even a query that crosses tenants, or a handler that mixes them up."""
    walked = [name for name in _queries() if name not in READS_NO_ROWS_OF_ONE_TENANT]
    assert len(walked) >= 9
    for name in walked:
        await _ask_about_another(engine, name)


async def _ask_about_another(engine: AsyncEngine, name: str) -> None:
    function = getattr(queries, name)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "conn"]
    async with engine.begin() as db:
        rows = (await db.execute(sa.select(TABLES["billing.request"]))).mappings().all()
        invoices = (await db.execute(sa.select(TABLES["billing.invoice"]))).mappings().all()
    for row, invoice in zip(rows, invoices, strict=True):
        values: dict[str, Any] = {
            "tenant": B,
            "rid": str(row["request_id"]),
            "invoice_id": invoice["id"],
            "since_ms": 0,
            "project": row["project"],
            "key_id": row["key_id"],
            "now": dt.datetime.now(dt.UTC),
            "wanted": queries.RequestFilter(since_ms=0),
            "limit": 100,
            "span": queries.Span(start_s=0, end_s=4_000_000_000, width_s=86400),
            "dimension": "project",
            "only": {},
            "kind": "csv",
            "asked": queries.Asked(start_s=0, end_s=4_000_000_000, width_s=86400, group_by=("project_id",)),
        }
        arguments = {p.name: values[p.name] for p in parameters if p.name in values}
        missing = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.name not in arguments]
        assert not missing, f"{name} has a parameter that this walk does not know: {missing}"
        async with tenant_read(engine, A) as db:
            answer = await function(db, **arguments)
        if name == "find_profile":  # nobody's profile has the defaults, under the name that was asked for
            assert answer == queries.Profile(organisation=B)
            continue
        assert B not in repr(answer), name
        assert f"of-{B}" not in repr(answer), name


async def test_the_record_of_changes_only_appends(engine: AsyncEngine, database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        for statement in (
            "DELETE FROM tenancy.change",
            "UPDATE tenancy.change SET actor = 'somebody else'",
            "UPDATE tenancy.change SET published_at = now(), detail = '{\"x\": 1}'",
        ):
            with pytest.raises(asyncpg.RestrictViolationError):
                await connection.execute(statement)
        await connection.execute("UPDATE tenancy.change SET published_at = now()")
    finally:
        await connection.close()
