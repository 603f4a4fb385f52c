"""`GET /v1/requests/{id}`."""

from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.guard import Guard
from gateway.lookup import Lookup
from gateway.schemas.answers import RequestView


def request_routes(guard: Guard, lookup: Lookup) -> list[HTTPRouteHandler]:
    """Return the handler of past and running requests."""

    @get("/v1/requests/{request_id:str}", summary="Get a request", operation_id="getRequest", tags=["requests"])
    async def get_request(request: Request[Any, Any, Any], request_id: FromPath[str]) -> RequestView:
        """Return how one of your requests went: meters, cost, path and timings."""
        key = await guard.key_of(request)
        return await lookup.find(key.organisation_id, request_id)

    return [get_request]
