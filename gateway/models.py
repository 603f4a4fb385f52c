"""Which models can be served now, and what is missing for the others."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import structlog

from contracts.beat import beat
from contracts.catalog import Catalog, Model, Route
from contracts.errors import ModelNotFound, NoCapacity, ServingError
from contracts.rating import Price
from gateway.fleet import Fleet
from gateway.names import Name, Names, notices
from gateway.prices import Prices
from gateway.prompt import ChatPrompt, PromptWorkshop, TokenizerUnusable

log = structlog.get_logger()

_LOOK_S: Final = 0.5
_BYTES_PER_TOKEN: Final = 4
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Servable(msgspec.Struct, frozen=True):
    """A model that has all that a request needs up to its price."""

    name: str  # public
    model: Model
    pool: str
    prompt: ChatPrompt
    local: bool = False  # in place of the primary model of a route
    headers: Mapping[str, str] = NO_HEADERS  # what clients are told of the name that they used


class Models:
    """The catalogue with the state of each model's parts. `run` until cancelled."""

    def __init__(
        self, catalog: Catalog, models_dir: Path, *, prices: Prices, fleet: Fleet, workshop: PromptWorkshop
    ) -> None:
        self.catalog = catalog
        self.names = Names()
        self.models_dir = models_dir
        self._prices = prices
        self._fleet = fleet
        self._workshop = workshop
        self._prompts: dict[str, ChatPrompt] = {}  # by tokenizer folder
        self._unusable: dict[str, str] = {}
        self.looked = False  # whether every tokenizer that is there was loaded once
        self._draw = random.random

    def servable(
        self, name: str, *, body_bytes: int = 0, local: bool | None = None, sticky: str | None = None
    ) -> Servable:
        """Return the model of that name or alias; of a route or a shared name, the model that takes this request.

        Args:
            name: as the client wrote it.
            body_bytes: of the request, for routes by length.
            local: what the caller's scopes say of local models (gateway.scopes.local_consent).
            sticky: requests with the same one get the same model of a shared name; empty = by chance.

        Raises:
            ModelNotFound: not in the catalogue.
            Withdrawn: an operator ended the name.
            NoCapacity: its tokenizer or its price is missing, or no complete path of workers is ready.
        """
        route = self.catalog.routes.get(name)
        if route is not None:
            return self.servable(route.primary) if local is False else self._routed(route, body_bytes)
        public, headers = self._meant(
            name, lambda said: self.names.choose(said, sticky or str(self._draw()), self._can_serve)
        )
        if local and self._down(public):
            for route in self.catalog.routes.values():
                if route.primary == public and not self.missing(route.local):
                    return msgspec.structs.replace(self._ready(route.local), local=True, headers=headers)
        found = self._ready(public)
        return msgspec.structs.replace(found, headers=headers) if headers else found

    def _ready(self, public: str) -> Servable:
        model = self.catalog.models[public]
        prompt = self._prompts.get(model.tokenizer)
        if prompt is None or public not in self._prices.list_prices:
            raise _not_ready(public, self.missing(public), retry_after_s=10)
        return Servable(public, model, self.catalog.pool_of(public), prompt)

    def _meant(self, name: str, choose: Callable[[Name], str]) -> tuple[str, Mapping[str, str]]:
        """Return the public name of the model that a name means now, and what clients are told of the name.

        `choose`: which of a name's targets.
        """
        said, found = self.names.find(name), self.catalog.find(name)
        if said is None and found is not None:
            said = self.names.find(found[0])  # an alias of the catalogue, of a model that is deprecated or shared
        if said is None:
            if found is None:
                raise ModelNotFound(name)
            return found[0], NO_HEADERS
        self.names.check(said)
        headers = notices(said)
        if said.targets:
            chosen = choose(said)
            if chosen in self.catalog.models:
                return chosen, headers
        if found is None:  # what served it has left the catalogue
            raise ModelNotFound(name)
        return found[0], headers

    def _can_serve(self, public: str) -> bool:
        return public in self.catalog.models and not self.missing(public)

    def _routed(self, route: Route, body_bytes: int) -> Servable:
        down = self._down(route.primary)
        short = body_bytes <= route.local_up_to_tokens * _BYTES_PER_TOKEN
        wanted = down or (route.local_up_to_tokens and short) or self._draw() < route.local_share
        if wanted and not self.missing(route.local):
            return msgspec.structs.replace(self.servable(route.local), local=True)
        return self.servable(route.primary)

    def _down(self, public: str) -> bool:
        """Whether a model cannot be served, or its pool is so short that a local one should."""
        return bool(self.missing(public)) or self._fleet.degraded(self.catalog.pool_of(public))

    def tokenizer(self, name: str) -> tuple[ChatPrompt, Model]:
        """Return what encodes a model's prompts; of a shared name, its first. Raises ModelNotFound, NoCapacity."""
        public, _ = self._meant(name, lambda said: said.targets[0].model)
        model = self.catalog.models[public]
        prompt = self._prompts.get(model.tokenizer)
        if prompt is None:
            raise _not_ready(public, self.missing(public), retry_after_s=10)
        return prompt, model

    def check_path(self, servable: Servable, *, may_wait_s: float) -> float | None:
        """Return None when a complete path of workers is ready, or the seconds until a sleeping pool should have one.

        Raises:
            NoCapacity: there is no path and none can be expected, or none within the time that the request may wait.
        """
        lacking = self._fleet.missing_path(servable.pool, servable.model.hand_off)
        if lacking is None:
            return None
        cold_s = self._fleet.wakes_in_s(servable.pool)
        if cold_s is None:
            note = self._fleet.pool(servable.pool).note
            told = [lacking, note.blocked] if note is not None and note.blocked else [lacking]
            raise _not_ready(
                servable.name, told, retry_after_s=5 if note is None or note.cold_s is None else note.cold_s
            )
        if cold_s > may_wait_s:
            raise NoCapacity(
                f"The model '{servable.name}' starts its first worker, which takes about {cold_s:.0f} s more; "
                f"this request waits {may_wait_s:.0f} s at most.",
                retry_after_s=cold_s,
            )
        return cold_s

    def missing(self, public: str) -> Sequence[str]:
        """Return what a model of the catalogue still needs; empty = ready."""
        model = self.catalog.models[public]
        lacking: list[str] = []
        if model.tokenizer not in self._prompts:
            lacking.append(self._unusable.get(model.tokenizer, f"no tokenizer folder '{model.tokenizer}' yet"))
        if public not in self._prices.list_prices:
            lacking.append("no price" if self._prices.database_up else "prices cannot be read")
        path = self._fleet.missing_path(self.catalog.pool_of(public), model.hand_off)
        if path is not None and self._fleet.wakes_in_s(self.catalog.pool_of(public)) is None:
            lacking.append(path)  # a pool that sleeps is ready: the first request wakes it
        return lacking

    @property
    def list_prices(self) -> Mapping[str, Price]:
        """Return the list prices that are known, by model."""
        return self._prices.list_prices

    def simulated(self, public: str) -> bool:
        """Return whether a timed engine makes the model's text."""
        return self._fleet.simulated(self.catalog.pool_of(public))

    async def run(self) -> None:
        """Load each tokenizer when its folder appears, and let go of those that no model needs any more."""
        while True:
            wanted = {model.tokenizer for model in self.catalog.models.values()}
            for name in self._prompts.keys() - wanted:
                del self._prompts[name]
            for name in sorted(wanted - self._prompts.keys()):
                folder = self.models_dir / name  # an absolute name stays as it is
                if (folder / "tokenizer.json").is_file():
                    await self._load(name, folder)
            self.looked = True
            await beat(_LOOK_S)

    async def _load(self, name: str, folder: Path) -> None:
        try:
            self._prompts[name] = await self._workshop.load(folder)
        except TokenizerUnusable as error:
            if self._unusable.get(name) != str(error):
                log.warning("tokenizer_unusable", tokenizer=name, error=str(error))
            self._unusable[name] = str(error)
        else:
            log.info("tokenizer_loaded", tokenizer=name)


def _not_ready(public: str, lacking: Sequence[str], *, retry_after_s: float) -> ServingError:
    return NoCapacity(
        f"The model '{public}' cannot be served right now: {', '.join(lacking)}.", retry_after_s=retry_after_s
    )
