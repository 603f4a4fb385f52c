"""`pdgate doctor`: what this machine can run, and whether the stack that runs is set up as it must be."""

import asyncio
import contextlib
import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.table import Table

from contracts.catalog import Catalog, read_catalog
from gateway.exposure import exposure_across_tenants
from pdgate import preflight
from pdgate.check_peers import peer_checks
from pdgate.check_services import postgres_checks, redis_checks, redis_facts
from pdgate.check_serving import Hardware, pool_facts, target_checks, worker_checks
from pdgate.connection import data_folder, gateway_url, open_database, open_redis
from pdgate.engine import engine_ready
from pdgate.findings import LOST, Check, attempt
from pdgate.layout import Layout, catalog_file, layout_of
from pdgate.libibverbs import LIBRARY, find_library
from pdgate.models import model_ready
from pdgate.output import AsJson, data_console, show_json
from pdgate.plan.hardware import accelerators, parse_gpus
from pdgate.plan.models import find_model
from pdgate.plan.workload import WorkloadError
from pdgate.preflight import CannotStart
from pdgate.services import postgres_binaries, valkey_binary
from pdgate.tuning import Line, buried, gateways, lines
from pdgate.why import decisions_folder


def doctor(
    tuning: Annotated[bool, typer.Option("--tuning", help="Twelve lines: five musts, seven shoulds.")] = False,
    gpus: Annotated[str | None, typer.Option(help="What one worker runs on, as 8xH100; with --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Its model: a name `pdgate plan` knows, or a config.json.")] = None,
    file: Annotated[Path | None, typer.Option("--catalog", help="models.toml.  [default: the stack's]")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and the running stack, and say what to change; exit 1 when something is to be changed."""
    chosen = file or catalog_file()
    if tuning:
        checklist = asyncio.run(_tuning(read_catalog(chosen)))
        _show_lines(checklist, as_json=as_json)
        raise typer.Exit(0 if all(line.ok for line in checklist if line.weight == "must") else 1)
    checks = [*examine(layout_of(data_folder()), chosen), *asyncio.run(_stack(chosen, _hardware(gpus, model)))]
    _show_checks(checks, as_json=as_json)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def examine(layout: Layout, catalog: Path) -> Sequence[Check]:
    """Return every finding about this machine: what `pdgate up` needs."""
    obstacle = preflight.real_engine_obstacle()
    engine = str(layout.engine) if engine_ready(layout.engine) else "not installed yet"
    return [
        Check(check="real engine", ok=True, found=f"no: {obstacle}; the timed engine runs" if obstacle else "can run"),
        attempt("disk", lambda: _disk(layout), "free some room, or set PDGATE_DATA to another disk"),
        attempt("Valkey", lambda: str(valkey_binary())),
        attempt("PostgreSQL", lambda: str(postgres_binaries())),
        Check(check="libibverbs", ok=True, found=_library(layout)),
        Check(check="engine", ok=True, found=engine),
        attempt("catalogue", lambda: _catalogue(layout, catalog), "`pdgate models check` names the field"),
        Check(check="gateway", ok=True, found=_gateway()),
    ]


async def _stack(file: Path, hardware: Hardware | None) -> Sequence[Check]:
    """Return the findings about the stack whose URLs are known; none where no stack has run."""
    checks: list[Check] = []
    try:
        catalog = read_catalog(file)
        async with open_redis() as redis, asyncio.timeout(10):
            checks += redis_checks(await redis_facts(redis))
            facts = await pool_facts(redis, catalog)
        async with open_database() as engine, asyncio.timeout(10):
            checks += await postgres_checks(engine)
    except (CannotStart, ValueError):
        return checks  # no stack has run here, or the catalogue is said to be bad already
    except LOST as error:
        lost = "PostgreSQL" if checks else "Redis"
        change = f"start it, or correct {'DATABASE_URL' if checks else 'REDIS_URL'}"
        return [*checks, Check(check=lost, ok=False, found=f"does not answer: {error}", change=change)]
    checks += await peer_checks([worker for pool in facts for worker in pool.workers])
    for pool in facts:
        if pool.workers or pool.led:
            checks += worker_checks(pool, catalog)
        checks += target_checks(pool, catalog, hardware=hardware)
    return checks


async def _tuning(catalog: Catalog) -> Sequence[Line]:
    async with open_redis() as redis, open_database() as engine:
        facts = await redis_facts(redis)
        pools = await pool_facts(redis, catalog)
        num_gateways, num_buried = await gateways(redis, int(time.time() * 1000)), await buried(redis)
        async with engine.connect() as db:
            exposure = await exposure_across_tenants(db)
    return lines(
        redis=facts,
        pools=pools,
        catalog=catalog,
        exposure=exposure,
        num_gateways=num_gateways,
        num_buried=num_buried,
        decisions=decisions_folder(),
    )


def _hardware(gpus: str | None, model: str | None) -> Hardware | None:
    if gpus is None or model is None:
        if gpus or model:
            raise typer.BadParameter("--gpus and --model go together")
        return None
    try:
        ((count, gpu),) = parse_gpus(gpus, accelerators())
        return Hardware(model=find_model(model), gpu=gpu, gpus=count)
    except (WorkloadError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def _show_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    if as_json:
        show_json(checks)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        found = f"{check.found}\n→ {check.change}" if check.change else check.found
        table.add_row("ok" if check.ok else "CHANGE", check.check, found, style=None if check.ok else "red")
    data_console().print(table)


def _show_lines(checklist: Sequence[Line], *, as_json: bool) -> None:
    if as_json:
        show_json(checklist)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "", "rule", "found", "change"):
        table.add_column(column, overflow="fold")
    for line in checklist:
        row = ("ok" if line.ok else "no", line.weight, line.rule, line.found, line.change)
        table.add_row(*row, style=None if line.ok else "red" if line.weight == "must" else "yellow")
    data_console().print(table)


def _disk(layout: Layout) -> str:
    preflight.check_disk(layout.data, preflight.DATA_DISK_BYTES, "the data folder")
    if not engine_ready(layout.engine):
        preflight.check_disk(layout.engine.parent, preflight.ENGINE_DISK_BYTES, "the engine")
    return "enough room"


def _library(layout: Layout) -> str:
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return "on this machine"
    found = find_library(layout.libraries)
    return str(found) if found else "missing; `pdgate up` fetches it where apt-get is there"


def _catalogue(layout: Layout, file: Path) -> str:
    models = read_catalog(file).models
    ready = sum(model_ready(layout.models / model.tokenizer) for model in models.values())
    return f"{file}: {len(models)} model(s), {ready} prepared"


def _gateway() -> str:
    try:
        url = gateway_url()
    except CannotStart:
        return "no stack has run here"
    try:
        answer = httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False)
    except httpx.TransportError:
        return f"{url} does not answer"
    return f"{url} is ready" if answer.status_code == httpx.codes.OK else f"{url} answers and is not ready"
