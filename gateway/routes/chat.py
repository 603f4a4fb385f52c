"""`POST /v1/chat/completions`."""

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from gateway.answers import Answers, StreamAnswer
from gateway.chat import Chat
from gateway.openapi import json_operation
from gateway.outputs import EventStream
from gateway.schemas.answers import ChatCompletion
from gateway.schemas.chat import ChatRequest
from gateway.starter import Starter


def chat_routes(starter: Starter, chat: Chat, answers: Answers) -> list[HTTPRouteHandler]:
    """Return the handlers of chat completions."""

    @post(
        "/v1/chat/completions",
        status_code=200,
        summary="Create a chat completion",
        operation_id="createChatCompletion",
        tags=["chat"],
        operation_class=json_operation(ChatRequest, ChatCompletion, streams=True),
        request_max_body_size=None,  # read_body bounds it
    )
    async def create_chat_completion(request: Request[Any, Any, Any]) -> ASGIResponse:
        """Answer a conversation, as one JSON body or as server-sent events."""
        asked = await chat.start(await starter.arrive(request))
        if isinstance(asked.output, EventStream):
            return StreamAnswer(asked.started, asked.output.writer, answers)
        return await answers.whole(asked.started, asked.output, request.receive)

    return [create_chat_completion]
