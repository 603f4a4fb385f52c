"""`POST /v1/prefixes/warm`."""

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from gateway.answers import Answers
from gateway.openapi import json_operation
from gateway.starter import Starter
from gateway.warming import WarmedPrefix, Warming, WarmRequest


def prefix_routes(starter: Starter, warming: Warming, answers: Answers) -> list[HTTPRouteHandler]:
    """Return the handler of prefixes."""

    @post(
        "/v1/prefixes/warm",
        status_code=200,
        summary="Compute a prompt ahead",
        operation_id="warmPrefix",
        tags=["prefixes"],
        operation_class=json_operation(WarmRequest, WarmedPrefix),
        request_max_body_size=None,  # read_body bounds it
    )
    async def warm_prefix(request: Request[Any, Any, Any]) -> ASGIResponse:
        """Put a system prompt, tools or text into the caches of workers. Only prefill is metered."""
        asked = await warming.start(await starter.arrive(request))
        return await answers.whole(asked.started, asked.output, request.receive)

    return [warm_prefix]
