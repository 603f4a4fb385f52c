"""`pdgate models` and `pdgate workers`."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from redis.asyncio import Redis

from contracts import keys
from contracts.catalog import Catalog, read_catalog
from contracts.wire import Registration
from pdgate.connection import data_folder, open_redis
from pdgate.layout import catalog_file, layout_of
from pdgate.models import model_ready
from pdgate.output import AsJson, show
from pdgate.preflight import CannotStart

models = typer.Typer(help="The catalogue of models, models.toml.", no_args_is_help=True)

CatalogFile = Annotated[Path | None, typer.Option("--file", help="Catalogue to read instead of models.toml.")]


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it is printed. Prices are currency units per million tokens."""

    model: str
    aliases: tuple[str, ...]
    pool: str
    tokenizer: str
    hand_off: str
    context_tokens: int
    default_max_tokens: int
    currency: str
    prefill_computed: str
    prefill_cached: str
    decode: str
    tiers: tuple[str, ...]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker as it is printed."""

    id: str
    pool: str
    role: str
    state: str
    epoch: int
    pid: int
    address: str
    engine: str
    simulated: bool
    running: int
    waiting: int


@models.command("list")
def list_models(file: CatalogFile = None, as_json: AsJson = False) -> None:
    """List the models of the catalogue with their prices."""
    catalog = _read(file or catalog_file())
    rows = [
        ModelRow(
            model=name,
            aliases=model.aliases,
            pool=catalog.pool_of(name),
            tokenizer=model.tokenizer,
            hand_off=model.hand_off.value,
            context_tokens=model.context_tokens,
            default_max_tokens=model.default_max_tokens,
            currency=catalog.currency,
            prefill_computed=model.price.prefill_computed,
            prefill_cached=model.price.prefill_cached,
            decode=model.price.decode,
            tiers=tuple(
                f"{tier}: TTFT {target.ttft_ms:g} ms, TPOT {target.tpot_ms:g} ms"
                for tier, target in model.tiers.items()
            ),
        )
        for name, model in catalog.models.items()
    ]
    show(rows, as_json=as_json, empty="the catalogue names no model")


@models.command("check")
def check_models(file: CatalogFile = None) -> None:
    """Check the catalogue; exit 2 with one line when it cannot be used."""
    chosen = file or catalog_file()
    catalog = _read(chosen)
    layout = layout_of(data_folder())
    typer.echo(f"{chosen}: {len(catalog.models)} model(s), currency {catalog.currency}, revision {catalog.revision}")
    for name, model in catalog.models.items():
        there = model_ready(layout.models / model.tokenizer)
        typer.echo(f"  {name}: " + ("prepared" if there else "`pdgate up` will prepare it, or put its folder there"))


def _read(file: Path) -> Catalog:
    catalog = read_catalog(file)
    if not catalog.models:
        raise CannotStart(f"{file}: there are no models")
    return catalog


def list_workers(file: CatalogFile = None, as_json: AsJson = False) -> None:
    """List the workers that are alive now."""

    async def run() -> list[WorkerRow]:
        async with open_redis() as redis:
            return [row for pool in _read(file or catalog_file()).pools for row in await _workers_of(redis, pool)]

    show(asyncio.run(run()), as_json=as_json, empty="no worker is alive")


async def _workers_of(redis: Redis, pool: str) -> list[WorkerRow]:
    ids: list[Any] = await redis.zrange(keys.pool_workers(pool), 0, -1)
    leases: list[Any] = [await redis.get(keys.worker_lease(pool, worker_id.decode())) for worker_id in sorted(ids)]
    found = [msgspec.msgpack.decode(lease, type=Registration) for lease in leases if lease]
    return [
        WorkerRow(
            id=worker.worker_id,
            pool=worker.pool,
            role=worker.role.value,
            state=worker.state.value,
            epoch=worker.epoch,
            pid=worker.pid,
            address=worker.address,
            engine=worker.engine,
            simulated=worker.simulated,
            running=worker.num_running,
            waiting=worker.num_waiting,
        )
        for worker in found
    ]
