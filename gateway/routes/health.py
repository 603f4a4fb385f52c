"""`/livez`, `/readyz` and `/metrics`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromQuery

from gateway.fleet import Fleet
from gateway.models import Models
from gateway.prices import Prices


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this gateway can serve every model of the catalogue, and what is missing."""

    ready: bool
    redis: bool
    postgres: bool
    workers_attached: int
    models: Mapping[str, Sequence[str]]  # what each model lacks; empty = ready


def health_routes(
    models: Models, prices: Prices, fleet: Fleet, exposition: Callable[[str], tuple[bytes, str]]
) -> list[HTTPRouteHandler]:
    """Return the handlers for machines that watch this process. They need no key."""

    @get("/livez", summary="Whether the process works", operation_id="livez", tags=["health"])
    async def livez() -> dict[str, str]:
        """Return 200 while the process can answer at all."""
        return {"status": "ok"}

    @get("/readyz", summary="Whether every model can be served", operation_id="readyz", tags=["health"])
    async def readyz(*, every_model: FromQuery[bool] = True) -> Response[Readiness]:
        """Return 200 when every model has its tokenizer, a price and a complete live path, else 503.

        With `every_model=false` models do not count, only whether this gateway can take requests at all. That is the
        question of a load balancer: a model without workers must not take the gateways of all others away.
        """
        lacking = {public: models.missing(public) for public in models.catalog.models}
        ready = fleet.redis_up and not (every_model and any(lacking.values()))
        body = Readiness(
            ready=ready,
            redis=fleet.redis_up,
            postgres=prices.database_up,
            workers_attached=fleet.num_attached,
            models=lacking,
        )
        return Response(body, status_code=200 if ready else 503)

    @get("/metrics", media_type="text/plain", summary="Metrics for Prometheus", operation_id="metrics", tags=["health"])
    async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return all metrics of this process in Prometheus' text format, or as OpenMetrics with exemplars."""
        text, media_type = exposition(request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    return [livez, readyz, metrics]
