"""The description of the API at `/schema`: what Litestar cannot see in a handler that reads its own body."""

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody, Schema

from gateway.schemas.answers import ChatCompletion
from gateway.schemas.chat import ChatRequest


def chat_operation() -> type[Operation]:
    """Return the operation class that describes body and answers of a chat completion."""
    request, answer = _schema(ChatRequest), _schema(ChatCompletion)

    @dataclass
    class ChatOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(
                content={"application/json": OpenAPIMediaType(schema=request)}, required=True
            )
            self.responses = {
                "200": OpenAPIResponse(
                    description="The answer; an event stream when `stream` is true.",
                    content={
                        "application/json": OpenAPIMediaType(schema=answer),
                        "text/event-stream": OpenAPIMediaType(schema=Schema(type=None)),
                    },
                ),
                "default": OpenAPIResponse(description="An OpenAI error object."),
            }

    return ChatOperation


class _Inline(Schema):
    """A schema given as it is, references resolved."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "raw", raw)

    def to_schema(self) -> dict[str, Any]:
        """Return the schema as it was given."""
        raw: dict[str, Any] = getattr(self, "raw")  # noqa: B009 - set beside the dataclass's own fields
        return raw


def _schema(kind: type[msgspec.Struct]) -> _Inline:
    (reference,), components = msgspec.json.schema_components([kind])
    return _Inline(_resolve(reference, components))


def _resolve(node: Any, components: dict[str, Any]) -> Any:
    """Return a schema with its references replaced by what they name. Ours are not recursive."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _resolve(components[node["$ref"].rsplit("/", 1)[-1]], components)
        return {key: _resolve(value, components) for key, value in node.items() if key != "discriminator"}
    if isinstance(node, list):
        return [_resolve(value, components) for value in node]
    return node
