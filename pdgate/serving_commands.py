"""`pdgate models`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts.additions import AddedModel, live, read_added
from contracts.catalog import Catalog, read_catalog
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
    source: str  # file, or added while the stack ran


@models.command("list")
def list_models(file: CatalogFile = None, as_json: AsJson = False) -> None:
    """List the models with their prices: the catalogue's file, and what was added to a stack that runs here."""
    catalog, added = live(read_models(file or catalog_file()))
    if file is None:
        added.take(asyncio.run(_added()))
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
            source="file" if added.from_file(name) else "added",
        )
        for name, model in catalog.models.items()
    ]
    show(rows, as_json=as_json, empty="the catalogue names no model")


@models.command("check")
def check_models(file: CatalogFile = None) -> None:
    """Check the catalogue; exit 2 with one line when it cannot be used."""
    chosen = file or catalog_file()
    catalog = read_models(chosen)
    layout = layout_of(data_folder())
    typer.echo(f"{chosen}: {len(catalog.models)} model(s), currency {catalog.currency}, revision {catalog.revision}")
    for name, model in catalog.models.items():
        there = model_ready(layout.models / model.tokenizer)
        typer.echo(f"  {name}: " + ("prepared" if there else "`pdgate up` will prepare it, or put its folder there"))


async def all_models(redis: Redis, file: Path | None) -> Catalog:
    """Return the catalogue with the models that were added to it. Raises CannotStart, CatalogError, RedisError."""
    catalog, models = live(read_models(file or catalog_file()))
    models.take(await read_added(redis) or ())
    return catalog


async def _added() -> Sequence[AddedModel]:
    """Return what was added to the stack that runs here; nothing where none does."""
    try:
        async with open_redis() as redis:
            return await read_added(redis) or ()
    except (CannotStart, RedisError, OSError, TimeoutError):
        return ()


def read_models(file: Path) -> Catalog:
    """Return a catalogue that names a model. Raises CannotStart or CatalogError."""
    catalog = read_catalog(file)
    if not catalog.models:
        raise CannotStart(f"{file}: there are no models")
    return catalog
