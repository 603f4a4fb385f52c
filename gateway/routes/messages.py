"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from gateway.answers import Answers, StreamAnswer
from gateway.messages import Messages, MessageStream
from gateway.openapi import json_operation
from gateway.schemas.messages import CountRequest, MessageAnswer, MessagesRequest, TokenCount
from gateway.starter import Starter


def message_routes(starter: Starter, messages: Messages, answers: Answers) -> list[HTTPRouteHandler]:
    """Return the handlers of messages."""

    @post(
        "/v1/messages",
        status_code=200,
        summary="Create a message",
        operation_id="createMessage",
        tags=["messages"],
        operation_class=json_operation(MessagesRequest, MessageAnswer, streams=True),
        request_max_body_size=None,  # read_body bounds it
    )
    async def create_message(request: Request[Any, Any, Any]) -> ASGIResponse:
        """Answer a conversation in Anthropic's form."""
        asked = await messages.start(await starter.arrive(request))
        if isinstance(asked.output, MessageStream):
            return StreamAnswer(asked.started, asked.output.writer, answers)
        return await answers.whole(asked.started, asked.output, request.receive)

    @post(
        "/v1/messages/count_tokens",
        status_code=200,
        summary="Count the tokens of a message",
        operation_id="countMessageTokens",
        tags=["messages"],
        operation_class=json_operation(CountRequest, TokenCount),
        request_max_body_size=None,
    )
    async def count_message_tokens(request: Request[Any, Any, Any]) -> TokenCount:
        """Return how many tokens a conversation has with this model. Free of charge."""
        return TokenCount(input_tokens=await messages.count(await starter.arrive(request, confirm=True)))

    return [create_message, count_message_tokens]
