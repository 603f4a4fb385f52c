"""PostgreSQL comes up again after kill -9, whatever its backends were doing."""

import asyncio
from pathlib import Path

import asyncpg
import psutil

from pdgate.services import start_postgres


async def test_a_backend_that_outlives_its_postmaster_does_not_keep_the_server_from_starting(service_folder: Path):
    service = await asyncio.to_thread(start_postgres, service_folder / "orphans")
    try:
        connection = await asyncpg.connect(service.url)
        await connection.execute("CREATE TABLE kept (n int); INSERT INTO kept VALUES (1)")
        pid = await connection.fetchval("SELECT pg_backend_pid()")
        backend = psutil.Process(pid)
        backend.suspend()  # as one that waits for a lock that nobody will release: it sees nothing
        service.process.kill()
        service.process.wait()
        service = await asyncio.to_thread(start_postgres, service_folder / "orphans")
        assert not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE
        connection.terminate()
        again = await asyncpg.connect(service.url)
        assert await again.fetchval("SELECT n FROM kept") == 1
        await again.close()
    finally:
        await asyncio.to_thread(service.stop)
