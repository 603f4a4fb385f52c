"""`GET /v1/models` and `GET /v1/models/{id}`."""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import ModelNotFound
from gateway.guard import Guard
from gateway.models import Models
from gateway.prices import Prices
from gateway.schemas.answers import ModelList, ModelPrice, ModelView, TierView, money_text
from gateway.scopes import Scopes, allows_model


def model_routes(guard: Guard, models: Models, prices: Prices) -> list[HTTPRouteHandler]:
    """Return the handlers of models."""

    def view(public: str) -> ModelView:
        model = models.catalog.models[public]
        price = prices.list_prices.get(public)
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

    def route_view(name: str) -> ModelView:
        """Return a route as its primary model, under its own name."""
        route = models.catalog.routes[name]
        return msgspec.structs.replace(
            view(route.primary),
            id=name,
            aliases=(),
            ready=not models.missing(route.primary) or not models.missing(route.local),
            route=(route.primary, route.local),
        )

    def allows_route(bounds: Sequence[Scopes], name: str) -> bool:
        route = models.catalog.routes[name]
        return allows_model(bounds, route.primary) and allows_model(bounds, route.local)

    @get("/v1/models", summary="List the models", operation_id="listModels", tags=["models"])
    async def list_models(request: Request[Any, Any, Any]) -> ModelList:
        """Return every model and route with its context length, prices and SLO targets."""
        key = await guard.key_of(request)
        found = [view(public) for public in models.catalog.models if allows_model(key.bounds, public)]
        found += [route_view(name) for name in models.catalog.routes if allows_route(key.bounds, name)]
        return ModelList(data=found)

    @get("/v1/models/{model_id:path}", summary="Get a model", operation_id="getModel", tags=["models"])
    async def get_model(request: Request[Any, Any, Any], model_id: FromPath[str]) -> ModelView:
        """Return one model, by its name or an alias, or one route."""
        key = await guard.key_of(request)
        name = model_id.lstrip("/")
        if name in models.catalog.routes and allows_route(key.bounds, name):
            return route_view(name)
        found = models.catalog.find(name)
        if found is None or not allows_model(key.bounds, found[0]):
            raise ModelNotFound(name)
        return view(found[0])

    return [list_models, get_model]
