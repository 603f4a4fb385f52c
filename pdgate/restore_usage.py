"""`pdgate usage restore`: usage that was lost with Redis' data, from the workers' journals."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from billing.attempts import AttemptSink
from billing.database import create_engine
from billing.partitions import Partitions
from billing.restore import Restored, read_journals, restore
from contracts.catalog import read_catalog
from pdgate.connection import data_folder, database_url, open_redis
from pdgate.layout import catalog_file, layout_of
from pdgate.output import AsJson, show_json
from pdgate.usage import money


def restore_usage(
    journals: Annotated[
        Path | None, typer.Option(help="Folder with the workers' journals; the stack's own if absent.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bill finished requests whose usage event was lost; again bills nothing twice."""
    folder = journals or layout_of(data_folder()).journal("")

    async def run() -> Restored:
        engine = create_engine(database_url(), pool_size=2)
        try:
            async with open_redis() as redis:
                return await restore(engine, redis, AttemptSink(engine, Partitions(engine)), read_journals(folder))
        finally:
            await engine.dispose()

    done = asyncio.run(run())
    if as_json:
        show_json(done)
        return
    currency = read_catalog(catalog_file()).currency
    typer.echo(
        f"{done.records} records read ({done.unreadable} lines unreadable), {done.cost_rows} cost rows added,"
        f" {len(done.requests)} requests restored: {money(done.cost_nano)} {currency}"
    )
    for rid in done.requests:
        typer.echo(rid)
