"""Whether a model can be added: are its weights whole, does it fit the memory, does it have a price."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from contracts.additions import AddedModel
from contracts.catalog import Catalog, CatalogError, Model, PriceText
from contracts.errors import BadRequest, ServingError
from contracts.lifecycle import HandOff
from contracts.memory import free_memory_bytes
from contracts.model_files import ModelFiles, ModelFilesError, read_model_files
from contracts.rating import Meter, Price
from contracts.roofline import USABLE_MEMORY
from contracts.slo import SloTarget

GB: Final = 1_000_000_000
ENGINE_BYTES: Final = 1_500_000_000  # that a worker's own process takes of a machine's memory, beside weights and cache
_PUBLIC: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

PublicName = Annotated[str, msgspec.Meta(pattern=_PUBLIC)]
Count = Annotated[int, msgspec.Meta(ge=0, le=64)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=3_600_000)]
MoneyText = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$")]


class NotAddable(ServingError):
    """Something is missing for a model to be served."""

    type, http_status = "invalid_request_error", 409


class NoWeights(NotAddable):
    """The folder does not hold a whole model."""

    code = "no_weights"


class NoMemory(NotAddable):
    """Its workers would not have the room, or nobody said how much they have."""

    code = "no_memory"


class NoPrice(NotAddable):
    """Nobody said what it costs."""

    code = "no_price"


class NewModelPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Currency units per million tokens."""

    prefill_computed: MoneyText
    prefill_cached: MoneyText
    decode: MoneyText


class NewModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model to serve beside the catalogue's file, with a pool of its own.

    `folder`: its files, an absolute path or below the models folder. `price`: unless the price book has one.
    `prefill`, `decode`, `unified`: workers that `pdgate up` runs for it; elsewhere others start them.
    `worker_memory_gb`: what the devices of one worker have together; without it this machine must have the room.
    """

    name: PublicName
    folder: Annotated[str, msgspec.Meta(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
    price: NewModelPrice | None = None
    prefill: Count = 0
    decode: Count = 0
    unified: Count = 0
    profile: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{0,60}$")] = ""
    aliases: Annotated[tuple[PublicName, ...], msgspec.Meta(max_length=20)] = ()
    context_tokens: Annotated[int, msgspec.Meta(ge=16, le=100_000_000)] | None = None
    default_max_tokens: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 4096
    hand_off: Literal["direct", "store"] = "direct"
    tool_parser: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{0,60}$")] = ""
    reasoning_parser: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{0,60}$")] = ""
    owned_by: Annotated[str, msgspec.Meta(max_length=100, pattern=r"^[^\x00-\x1f\x7f<>\"]*$")] = "pdgate"
    ttft_ms: Milliseconds = 2000.0
    tpot_ms: Milliseconds = 100.0
    worker_memory_gb: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None


def checked_model(
    wanted: NewModel, catalog: Catalog, models_dir: Path, prices: Mapping[str, Price], *, created_unix_s: int
) -> AddedModel:
    """Return a model that can be added. Reads files, so not on the event loop.

    Raises:
        BadRequest: a name is taken, or the workers asked for could serve nothing.
        NotAddable: weights, memory or a price are missing; the message says what.
    """
    _check_names(wanted, catalog)
    if not wanted.unified and bool(wanted.prefill) != bool(wanted.decode):
        raise BadRequest("A prefill worker needs a decode worker, and the other way round.", param="prefill")
    folder = models_dir / wanted.folder  # an absolute path stays as it is
    if ".." in folder.parts:
        raise BadRequest("A folder is below the models folder, or an absolute path.", param="folder")
    try:
        files = read_model_files(folder)
    except ModelFilesError as error:
        raise NoWeights(f"{error}.", param="folder") from None
    context = wanted.context_tokens or files.context_tokens
    if context < 16:
        raise BadRequest("Its config says no longest context: say 'context_tokens'.", param="context_tokens")
    if files.context_tokens and context > files.context_tokens:
        raise BadRequest(
            f"The model was made for {files.context_tokens} tokens of context, not {context}.", param="context_tokens"
        )
    _check_memory(wanted, files, context)
    model = Model(
        tokenizer=wanted.folder,
        context_tokens=context,
        price=_price(wanted, prices),
        aliases=wanted.aliases,
        default_max_tokens=min(wanted.default_max_tokens, context),
        hand_off=HandOff(wanted.hand_off),
        owned_by=wanted.owned_by,
        tool_parser=wanted.tool_parser,
        reasoning_parser=wanted.reasoning_parser,
        tiers={"default": SloTarget(ttft_ms=wanted.ttft_ms, tpot_ms=wanted.tpot_ms)},
        created_unix_s=created_unix_s,
    )
    return AddedModel(
        name=wanted.name,
        model=model,
        folder=str(folder),
        prefill=wanted.prefill,
        decode=wanted.decode,
        unified=wanted.unified,
        profile=wanted.profile,
    )


def needed_bytes(files: ModelFiles, context_tokens: int) -> int:
    """Return what one worker needs at least: the weights, and the cache of one request as long as may be."""
    return files.weight_bytes + context_tokens * files.shape.kv_bytes_per_token()


def _check_names(wanted: NewModel, catalog: Catalog) -> None:
    for name in (wanted.name, *wanted.aliases):
        if catalog.find(name) is not None or name in catalog.routes:
            raise BadRequest(f"'{name}' names something already.", param="name")
    if wanted.name in catalog.pools:
        raise BadRequest(f"'{wanted.name}' is the pool of another model.", param="name")
    if len({wanted.name, *wanted.aliases}) != 1 + len(wanted.aliases):
        raise BadRequest("A name is given twice.", param="aliases")


def _check_memory(wanted: NewModel, files: ModelFiles, context_tokens: int) -> None:
    needed = needed_bytes(files, context_tokens)
    said = f"weights {files.weight_bytes / GB:.2f} GB and the cache of one request of {context_tokens} tokens"
    if wanted.worker_memory_gb is not None:
        usable = int(wanted.worker_memory_gb * GB * USABLE_MEMORY)
        if needed > usable:
            raise NoMemory(
                f"A worker needs {needed / GB:.2f} GB ({said}); of {wanted.worker_memory_gb:g} GB it may use"
                f" {usable / GB:.2f} GB.",
                param="worker_memory_gb",
            )
        return
    workers = wanted.prefill + wanted.decode + wanted.unified
    if not workers:
        raise NoMemory(
            "Its workers run elsewhere: say what the devices of one have together in 'worker_memory_gb'.",
            param="worker_memory_gb",
        )
    free, all_of_them = free_memory_bytes(), workers * (needed + ENGINE_BYTES)
    if all_of_them > free:
        raise NoMemory(
            f"{workers} workers need {all_of_them / GB:.2f} GB here ({said}, and the engine, each);"
            f" {free / GB:.2f} GB are free.",
            param="worker_memory_gb",
        )


def _price(wanted: NewModel, prices: Mapping[str, Price]) -> PriceText:
    if wanted.price is not None:
        price = PriceText(**msgspec.structs.asdict(wanted.price))
        for meter in Meter:
            try:
                price.nano(meter.value)
            except CatalogError as error:
                raise BadRequest(str(error), param="price") from None
        return price
    known = prices.get(wanted.name)
    if known is None:
        raise NoPrice("A model without a price is not served: give one.", param="price")
    texts = {meter.value: _text(known.of(meter)) for meter in Meter}
    return PriceText(**texts)


def _text(nano: int) -> str:
    return f"{nano // GB}.{nano % GB:09d}"
