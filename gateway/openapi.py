"""The description of the API at `/schema`: what Litestar cannot see in a handler that reads its own body."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import (
    Link,
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Reference,
    RequestBody,
    Schema,
)

from gateway.admin.links import LINKS


def json_operation(
    request: Any, answer: type[msgspec.Struct], *, streams: bool = False, status: int = 200
) -> type[Operation]:
    """Return the operation class of a handler that takes and gives JSON, or an event stream where it `streams`."""
    asked, given = _schema(request), _schema(answer)
    content = {"application/json": OpenAPIMediaType(schema=given)}
    if streams:
        content["text/event-stream"] = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING))

    @dataclass
    class JsonOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(content={"application/json": OpenAPIMediaType(schema=asked)}, required=True)
            words = "The answer; an event stream when `stream` is true." if streams else "The answer."
            self.responses = {
                str(status): OpenAPIResponse(description=words, content=content),
                "default": _error(),
            }
            _link(self)

    return JsonOperation


def form_operation(answer: type[msgspec.Struct]) -> type[Operation]:
    """Return the operation class of a handler that takes a file as multipart form data."""
    given = _schema(answer)
    fields: dict[str, Reference | Schema] = {
        "file": Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY),
        "purpose": Schema(type=OpenAPIType.STRING, enum=["batch"]),
    }
    form = Schema(type=OpenAPIType.OBJECT, properties=fields, required=["file", "purpose"])

    @dataclass
    class FormOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(
                content={"multipart/form-data": OpenAPIMediaType(schema=form)}, required=True
            )
            content = {"application/json": OpenAPIMediaType(schema=given)}
            self.responses = {
                "200": OpenAPIResponse(description="The file.", content=content),
                "default": _error(),
            }

    return FormOperation


@dataclass
class ReadOperation(Operation):
    """An operation as Litestar sees it, with our error object instead of Litestar's own."""

    def __post_init__(self) -> None:
        """Replace what Litestar says of errors."""
        own = {status: answer for status, answer in (self.responses or {}).items() if status != "400"}
        self.responses = {**own, "default": _error()}
        _link(self)


def describe_errors(handlers: Sequence[HTTPRouteHandler]) -> Sequence[HTTPRouteHandler]:
    """Return the handlers, each with a description of its errors."""
    for handler in handlers:
        if handler.operation_class is Operation:
            handler.operation_class = ReadOperation
    return handlers


def _link(operation: Operation) -> None:
    """Say what may follow on a success."""
    leads = LINKS.get(operation.operation_id or "")
    if not leads:
        return
    for status, answer in (operation.responses or {}).items():
        if status.startswith("2") and isinstance(answer, OpenAPIResponse):
            answer.links = {
                target: Link(
                    operation_id=target,
                    parameters=dict(lead.parameters),
                    request_body=dict(lead.body) or None,
                )
                for target, lead in leads.items()
            }


def _error() -> OpenAPIResponse:
    schema = Schema(type=OpenAPIType.OBJECT, properties={"error": Schema(type=OpenAPIType.OBJECT)}, required=["error"])
    return OpenAPIResponse(description="An error.", content={"application/json": OpenAPIMediaType(schema=schema)})


class _Inline(Schema):
    """A schema given as it is, references resolved."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "raw", raw)

    def to_schema(self) -> dict[str, Any]:
        """Return the schema as it was given."""
        raw: dict[str, Any] = getattr(self, "raw")  # noqa: B009 - set beside the dataclass's own fields
        return raw


def _schema(kind: Any) -> _Inline:
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
