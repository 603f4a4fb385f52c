"""`POST /v1/chat/completions`."""

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from gateway.answers import Answers, StreamAnswer
from gateway.chat import Chat
from gateway.openapi import chat_operation
from gateway.outputs import EventStream


def chat_routes(chat: Chat, answers: Answers) -> list[HTTPRouteHandler]:
    """Return the handlers of chat completions."""

    @post(
        "/v1/chat/completions",
        status_code=200,
        summary="Create a chat completion",
        tags=["chat"],
        operation_class=chat_operation(),
        request_max_body_size=None,  # read_body bounds it
    )
    async def create_chat_completion(request: Request[Any, Any, Any]) -> ASGIResponse:
        """Answer a conversation, as one JSON body or as server-sent events."""
        started = await chat.start(request)
        if isinstance(started.output, EventStream):
            return StreamAnswer(started, started.output, answers)
        return await answers.whole(started, started.output, request.receive)

    return [create_chat_completion]
