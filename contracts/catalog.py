"""The catalogue of models, `models.toml`: what every process must know alike about a model.

```toml
[models.smollm2]                       # public name
pool = "smollm2"                       # default: the name
tokenizer = "smollm2"                  # folder under the models folder, or an absolute path
aliases = ["SmolLM2-135M-Instruct"]
context_tokens = 2048
default_max_tokens = 512               # default: 4096
default_temperature = 0.2              # of a request that names none; default: the engine's
default_top_p = 0.9
hand_off = "direct"                    # or "store": unified engines share KV pages, a role is a label
store = "file"                         # with hand_off "store": a folder on one machine, or "mooncake"
owned_by = "HuggingFaceTB"
tool_parser = "hermes"                 # SGLang's name for the format of the model's tool calls; default: none
reasoning_parser = "qwen3"             # likewise for its reasoning
adapter = ""                           # LoRA: folder under the models folder, served by the workers of `pool`

[models.smollm2.price]                 # currency units per million tokens, as text: money is never a float
prefill_computed = "0.10"
prefill_cached = "0.02"
decode = "0.40"

[models.smollm2.tiers.default]         # SLO targets
ttft_ms = 4000
tpot_ms = 400

[models.smollm2.scaling]               # workers come and go by demand: see contracts/scaling.py
max_workers = 4

[routes.assistant]                     # a name for two models: see Route
primary = "large"
local = "smollm2"
local_share = 0.2
```
"""

import hashlib
import tomllib
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path as FilePath
from typing import Annotated

import msgspec

from contracts.lifecycle import HandOff, StoreKind
from contracts.perf import LatencyModel
from contracts.scaling import Scaling, ScalingError
from contracts.slo import SloTarget
from contracts.units import NanoPerMillion

NANO_PER_UNIT = 1_000_000_000


class CatalogError(ValueError):
    """The catalogue cannot be used; the message names file, model and field."""


class PriceText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices as written: decimal text, currency units per million tokens."""

    prefill_computed: str
    prefill_cached: str
    decode: str

    def nano(self, field: str) -> NanoPerMillion:
        """Return one price in nano-units per million tokens. Raises CatalogError when it is not exact."""
        text: str = getattr(self, field)
        try:
            amount = Decimal(text) * NANO_PER_UNIT
        except InvalidOperation:
            raise CatalogError(f"price {field} = {text!r} is not a decimal number") from None
        if amount != amount.to_integral_value() or amount < 0:
            raise CatalogError(f"price {field} = {text!r} must be >= 0 with at most 9 decimals")
        return NanoPerMillion(int(amount))


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model as the catalogue describes it."""

    tokenizer: str
    context_tokens: int
    price: PriceText
    pool: str = ""
    aliases: tuple[str, ...] = ()
    default_max_tokens: int = 4096
    default_temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    default_top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    hand_off: HandOff = HandOff.DIRECT
    store: StoreKind = StoreKind.FILE
    owned_by: str = "pdgate"
    tool_parser: str = ""
    reasoning_parser: str = ""
    adapter: str = ""
    latency: LatencyModel | None = None
    """Costs of one of its workers, where they are known; otherwise they are learned."""
    scaling: Scaling | None = None
    """How many workers its pool may have; None = those it was started with. The first model of a pool speaks for it."""
    tiers: Mapping[str, SloTarget] = msgspec.field(
        default_factory=lambda: {"default": SloTarget(ttft_ms=2000, tpot_ms=100)}
    )
    created_unix_s: int = 1_730_000_000


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public name that stands for two models. Who asks for it agrees to be served by the small local one.

    The local model takes a share of the requests, short prompts, and everything while the primary's pool is down or
    degraded; each answer names, and is billed as, the model that made it.
    """

    primary: str
    local: str
    local_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    local_up_to_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Prompts up to this length go there, estimated at four bytes of the body a token."""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: Mapping[str, Model]
    routes: Mapping[str, Route] = {}
    currency: str = "EUR"


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """All models, by public name. `revision` changes with every byte of the file."""

    models: Mapping[str, Model]
    currency: str
    revision: str
    routes: Mapping[str, Route] = {}

    def find(self, name: str) -> tuple[str, Model] | None:
        """Return the public name and the model for a name or alias."""
        if name in self.models:
            return name, self.models[name]
        for public, model in self.models.items():
            if name in model.aliases:
                return public, model
        return None

    def pool_of(self, name: str) -> str:
        """Return the pool that serves the model with this public name."""
        return self.models[name].pool or name

    def adapters_of(self, pool: str) -> Mapping[str, str]:
        """Return the LoRA adapters of a pool: folder by public name, which is also the engine's name for it."""
        return {name: m.adapter for name, m in self.models.items() if m.adapter and self.pool_of(name) == pool}

    def scaling_of(self, pool: str) -> Scaling | None:
        """Return how many workers a pool may have; None = those it was started with."""
        return next((m.scaling for name, m in self.models.items() if self.pool_of(name) == pool), None)

    @property
    def pools(self) -> tuple[str, ...]:
        """Every pool once, in the file's order."""
        return tuple(dict.fromkeys(self.pool_of(name) for name in self.models))


def _check_routes(file: FilePath, parsed: _File, names: Mapping[str, str]) -> None:
    for name, route in parsed.routes.items():
        if name in names:
            raise CatalogError(f"{file}: '{name}' names both {names[name]} and a route")
        for public in (route.primary, route.local):
            if public not in parsed.models:
                raise CatalogError(f"{file}: routes.{name} needs the model '{public}', which is not there")


def _check_model(file: FilePath, public: str, model: Model) -> None:
    if model.adapter and not model.pool:
        raise CatalogError(f"{file}: models.{public}.pool must name the pool that serves its adapter")
    if not model.context_tokens >= 16:
        raise CatalogError(f"{file}: models.{public}.context_tokens must be at least 16")
    if model.scaling is not None:
        try:
            model.scaling.check()
        except ScalingError as error:
            raise CatalogError(f"{file}: models.{public}.scaling: {error}") from None
    for field in ("prefill_computed", "prefill_cached", "decode"):
        try:
            model.price.nano(field)
        except CatalogError as error:
            raise CatalogError(f"{file}: models.{public}.{error}") from None


def read_catalog(file: FilePath) -> Catalog:
    """Return the catalogue in `file`.

    Raises:
        CatalogError: unreadable, not TOML, an unknown field, a bad price, or a name used twice.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CatalogError(f"{file}: {error.strerror}") from None
    try:
        parsed = msgspec.convert(tomllib.loads(raw.decode()), _File)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise CatalogError(f"{file}: {error}") from None
    seen: dict[str, str] = {}
    for public, model in parsed.models.items():
        for name in (public, *model.aliases):
            if name in seen:
                raise CatalogError(f"{file}: '{name}' names both {seen[name]} and {public}")
            seen[name] = public
        _check_model(file, public, model)
    _check_routes(file, parsed, seen)
    return Catalog(
        models=parsed.models,
        routes=parsed.routes,
        currency=parsed.currency,
        revision=hashlib.sha256(raw).hexdigest()[:12],
    )
