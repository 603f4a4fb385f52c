"""The migrations make what the tables say, from nothing, on any number of processes at once."""

import asyncio
import os
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

import asyncpg
import pytest

from billing.database import create_engine
from billing.partitions import Partitions, ensure_partitions, partition_days
from migrations.upgrade import upgrade, upgrade_in_loop

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
async def empty_database_url(postgres_url):
    """A database of its own, without any schema."""
    name = f"empty_{os.getpid()}"
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f"CREATE DATABASE {name}")
    yield postgres_url.replace("/pdgate?", f"/{name}?")
    await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await connection.close()


def alembic(database_url, *words):
    return subprocess.run(
        [sys.executable, "-m", "alembic", *words],
        env={**os.environ, "DATABASE_URL": database_url},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def test_the_schema_is_what_the_tables_say_also_with_partitions(empty_database_url):
    await asyncio.to_thread(upgrade, empty_database_url)
    engine = create_engine(empty_database_url)
    async with engine.begin() as conn:
        await ensure_partitions(conn, date(2026, 1, 1), 2)
    done = await asyncio.to_thread(alembic, empty_database_url, "check")
    assert done.returncode == 0, done.stdout + done.stderr
    async with engine.begin() as conn:
        await conn.exec_driver_sql("ALTER TABLE billing.request DROP COLUMN cause")
    await engine.dispose()
    done = await asyncio.to_thread(alembic, empty_database_url, "check")
    assert done.returncode != 0
    assert "add_column" in done.stdout + done.stderr


async def test_upgrades_at_once_do_the_work_once(empty_database_url):
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(upgrade_in_loop(empty_database_url))
    done = await asyncio.to_thread(alembic, empty_database_url, "current")
    assert "(head)" in done.stdout


async def test_a_downgrade_leaves_nothing(empty_database_url):
    await asyncio.to_thread(upgrade, empty_database_url)
    done = await asyncio.to_thread(alembic, empty_database_url, "downgrade", "base")
    assert done.returncode == 0, done.stderr
    await asyncio.to_thread(upgrade, empty_database_url)


async def test_without_a_url_the_message_names_the_variable():
    environ = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "alembic", "current"],
        env=environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("DATABASE_URL: must be set")


async def test_partitions_are_made_ahead_once_by_any_number_of_processes(engine):
    async def make():
        async with engine.begin() as conn:
            return await ensure_partitions(conn, date(2031, 12, 30), 3)

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(make()) for _ in range(3)]
    assert sorted(task.result() for task in made) == [0, 0, 9]
    async with engine.connect() as conn:
        days = await partition_days(conn)
    assert {date(2031, 12, 30), date(2031, 12, 31), date(2032, 1, 1)} <= days


async def test_today_and_the_coming_week_can_be_written(engine):
    today = datetime.now(UTC).date()
    partitions = Partitions(engine)
    assert await partitions.writable({today, date(1999, 1, 1)}) == {today}
    async with engine.connect() as conn:
        assert len([day for day in await partition_days(conn) if day > today]) >= 7
