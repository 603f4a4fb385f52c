"""`POST /v1/completions`."""

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from gateway.answers import Answers, StreamAnswer
from gateway.completions import Completions, CompletionStream
from gateway.openapi import json_operation
from gateway.schemas.completions import Completion, CompletionRequest
from gateway.starter import Starter


def completion_routes(starter: Starter, completions: Completions, answers: Answers) -> list[HTTPRouteHandler]:
    """Return the handler of legacy completions."""

    @post(
        "/v1/completions",
        status_code=200,
        summary="Create a completion",
        operation_id="createCompletion",
        tags=["completions"],
        operation_class=json_operation(CompletionRequest, Completion, streams=True),
        request_max_body_size=None,  # read_body bounds it
    )
    async def create_completion(request: Request[Any, Any, Any]) -> ASGIResponse:
        """Continue one prompt or many, given as text or token ids."""
        asked = await completions.start(await starter.arrive(request))
        if isinstance(asked.output, CompletionStream):
            return StreamAnswer(asked.started, asked.output.writer, answers)
        return await answers.whole(asked.started, asked.output, request.receive)

    return [create_completion]
