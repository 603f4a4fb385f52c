"""What `GET /v1/models` says of models, routes and given names."""

from collections.abc import Sequence

import msgspec

from contracts.errors import ModelNotFound
from gateway.models import Models
from gateway.names import Name
from gateway.prices import Prices
from gateway.schemas.answers import ModelPrice, ModelView, TierView, money_text
from gateway.scopes import Scopes, allows_model


class ModelViews:
    """Describes what a key may use."""

    def __init__(self, models: Models, prices: Prices) -> None:
        self._models = models
        self._prices = prices

    def all(self, bounds: Sequence[Scopes]) -> Sequence[ModelView]:
        """Return every model, then routes, then names that operators gave."""
        models = self._models
        found = [
            _ending(self._model(public), models.names.find(public))
            for public in models.catalog.models
            if allows_model(bounds, public)
        ]
        found += [self._route(name) for name in models.catalog.routes if self._allows_route(bounds, name)]
        given = [said for said in models.names.all() if models.catalog.find(said.name) is None]
        return found + [self._named(said) for said in given if self._allows_named(bounds, said)]

    def one(self, bounds: Sequence[Scopes], name: str) -> ModelView:
        """Return one by its name or an alias. Raises ModelNotFound."""
        catalog = self._models.catalog
        if name in catalog.routes and self._allows_route(bounds, name):
            return self._route(name)
        said, found = self._models.names.find(name), catalog.find(name)
        if found is not None and allows_model(bounds, found[0]):
            return _ending(self._model(found[0]), said or self._models.names.find(found[0]))
        if found is None and said is not None and self._allows_named(bounds, said):
            return self._named(said)
        raise ModelNotFound(name)

    def _model(self, public: str) -> ModelView:
        models = self._models
        model = models.catalog.models[public]
        price = self._prices.list_prices.get(public)
        return ModelView(
            id=public,
            created=model.created_unix_s,
            owned_by=model.owned_by,
            context_length=model.context_tokens,
            max_output_tokens=model.default_max_tokens,
            aliases=model.aliases,
            ready=not models.missing(public),
            simulated=models.simulated(public),
            price=None
            if price is None
            else ModelPrice(
                prefill_computed=money_text(price.prefill_computed),
                prefill_cached=money_text(price.prefill_cached),
                decode=money_text(price.decode),
                currency=models.catalog.currency,
                version=price.version,
            ),
            tiers={name: TierView(ttft_ms=t.ttft_ms, tpot_ms=t.tpot_ms) for name, t in model.tiers.items()},
            hand_off=model.hand_off,
        )

    def _route(self, name: str) -> ModelView:
        """Return a route as its primary model, under its own name."""
        route = self._models.catalog.routes[name]
        return msgspec.structs.replace(
            self._model(route.primary),
            id=name,
            aliases=(),
            ready=not self._models.missing(route.primary) or not self._models.missing(route.local),
            route=(route.primary, route.local),
        )

    def _named(self, said: Name) -> ModelView:
        """Return a given name as its first model, under that name."""
        targets = self._targets(said)
        ready = any(not self._models.missing(public) for public in targets)
        first = msgspec.structs.replace(self._model(targets[0]), id=said.name, aliases=(), ready=ready)
        return _ending(first, said)

    def _targets(self, said: Name) -> Sequence[str]:
        return [one.model for one in said.targets if one.model in self._models.catalog.models]

    def _allows_named(self, bounds: Sequence[Scopes], said: Name) -> bool:
        targets = self._targets(said)
        return bool(targets) and all(allows_model(bounds, public) for public in targets)

    def _allows_route(self, bounds: Sequence[Scopes], name: str) -> bool:
        route = self._models.catalog.routes[name]
        return allows_model(bounds, route.primary) and allows_model(bounds, route.local)


def _ending(found: ModelView, said: Name | None) -> ModelView:
    """Return a model with what operators said of its name."""
    if said is None:
        return found
    deprecated, sunset = said.deprecated_at, said.sunset_at
    return msgspec.structs.replace(
        found,
        targets=tuple(one.model for one in said.targets),
        deprecated_at=int(deprecated.timestamp()) if deprecated else None,
        sunset_at=int(sunset.timestamp()) if sunset else None,
        replacement=said.replacement or None,
    )
