"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.guard import Guard
from gateway.model_views import ModelViews
from gateway.schemas.answers import ModelList, ModelView


def model_routes(guard: Guard, views: ModelViews) -> list[HTTPRouteHandler]:
    """Return the handlers of models."""

    @get("/v1/models", summary="List the models", operation_id="listModels", tags=["models"])
    async def list_models(request: Request[Any, Any, Any]) -> ModelList:
        """Return every model, route and given name with its context length, prices and SLO targets."""
        key = await guard.key_of(request)
        return ModelList(data=views.all(key.bounds))

    @get("/v1/models/{model_id:path}", summary="Get a model", operation_id="getModel", tags=["models"])
    async def get_model(request: Request[Any, Any, Any], model_id: FromPath[str]) -> ModelView:
        """Return one model by its name or an alias, one route, or one given name."""
        key = await guard.key_of(request)
        return views.one(key.bounds, model_id.lstrip("/"))

    return [list_models, get_model]
