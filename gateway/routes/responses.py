"""`/v1/responses`: create, retrieve, cancel, delete, list the input."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from contracts.errors import BadRequest
from gateway.answers import Answers, StreamAnswer
from gateway.guard import Guard
from gateway.openapi import json_operation
from gateway.response_book import ResponseBook
from gateway.responses import Responses, ResponseStream
from gateway.schemas import response_objects
from gateway.schemas.responses import ResponsesRequest
from gateway.starter import Starter

Http = Request[Any, Any, Any]


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is kept no longer."""

    id: str
    deleted: bool = True
    object: str = "response.deleted"


class InputItems(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a response."""

    data: Sequence[Mapping[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"


def response_routes(
    starter: Starter, responses: Responses, book: ResponseBook, guard: Guard, answers: Answers
) -> list[HTTPRouteHandler]:
    """Return the handlers of responses."""

    async def org_of(request: Http) -> str:
        return (await guard.key_of(request)).organisation_id

    @post(
        "/v1/responses",
        status_code=200,
        summary="Create a response",
        operation_id="createResponse",
        tags=["responses"],
        operation_class=json_operation(ResponsesRequest, response_objects.Response, streams=True),
        request_max_body_size=None,  # read_body bounds it
    )
    async def create_response(request: Http) -> ASGIResponse:
        """Answer a conversation, now, as events, or in the background."""
        asked = await responses.start(await starter.arrive(request))
        if isinstance(asked.output, ResponseStream):
            return StreamAnswer(asked.started, asked.output.writer, answers)
        if asked.response.background:
            answers.answered(asked.started, 200)
            body = msgspec.json.encode(asked.response)
            return ASGIResponse(body=body, media_type="application/json", headers=asked.started.headers)
        return await answers.whole(asked.started, asked.output, request.receive)

    @get(
        "/v1/responses/{response_id:str}",
        summary="Get a response",
        operation_id="getResponse",
        tags=["responses"],
    )
    async def get_response(request: Http, response_id: FromPath[str]) -> response_objects.Response:
        """Return a response as it stands."""
        if request.query_params.get("stream") in ("true", "1"):
            raise BadRequest("Streaming of a stored response is not supported.", param="stream")
        return (await book.find(await org_of(request), response_id)).response

    @post(
        "/v1/responses/{response_id:str}/cancel",
        status_code=200,
        summary="Cancel a response",
        operation_id="cancelResponse",
        tags=["responses"],
    )
    async def cancel_response(request: Http, response_id: FromPath[str]) -> response_objects.Response:
        """Stop a response that is being made; one that has ended is returned as it is."""
        return (await book.cancel(await org_of(request), response_id)).response

    @delete(
        "/v1/responses/{response_id:str}",
        status_code=200,
        summary="Delete a response",
        operation_id="deleteResponse",
        tags=["responses"],
    )
    async def delete_response(request: Http, response_id: FromPath[str]) -> Response[Deleted]:
        """Forget a response that has ended."""
        await book.delete(await org_of(request), response_id)
        return Response(Deleted(id=response_id))

    @get(
        "/v1/responses/{response_id:str}/input_items",
        summary="List the input of a response",
        operation_id="listInputItems",
        tags=["responses"],
    )
    async def list_input_items(request: Http, response_id: FromPath[str]) -> InputItems:
        """Return what a response was asked, previous responses apart."""
        items = (await book.find(await org_of(request), response_id)).input_items
        ids = [item["id"] for item in items]
        return InputItems(data=items, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)

    return [create_response, get_response, cancel_response, delete_response, list_input_items]
