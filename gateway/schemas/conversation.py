"""The messages of a chat request, and what a chat template is given of them."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from contracts.errors import BadRequest


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A piece of text in a message."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """A picture: recognised in order to be refused by name."""


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    """A sound: recognised in order to be refused by name."""


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    """A file: recognised in order to be refused by name."""


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """What an assistant refused with, sent back as history."""

    refusal: str


Part = TextPart | ImagePart | AudioPart | FilePart | RefusalPart


class CalledFunction(msgspec.Struct, frozen=True):
    """What an assistant called. `arguments` is JSON text."""

    name: str
    arguments: str = ""


class CalledTool(msgspec.Struct, frozen=True):
    """A tool call that an assistant made, sent back as history."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def check_messages(messages: Sequence[Message]) -> None:
    """Raise BadRequest for a message that lacks something, or holds what models of text cannot read."""
    for i, message in enumerate(messages):
        if message.role == "tool" and not message.tool_call_id:
            raise BadRequest(
                f"Missing required parameter: 'messages[{i}].tool_call_id'.", param=f"messages[{i}].tool_call_id"
            )
        if message.content is None and message.role != "assistant":
            raise BadRequest("This message needs content.", param=f"messages[{i}].content")
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if isinstance(part, ImagePart | AudioPart | FilePart):
                    raise BadRequest(
                        "Only text is supported: this model takes no images, audio or files.",
                        param=f"messages[{i}].content[{j}]",
                    )


def text_of(message: Message) -> str:
    """Return the text of a message, its parts joined."""
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return "".join(
        part.text if isinstance(part, TextPart) else getattr(part, "refusal", "") for part in message.content
    )


def for_template(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it; arguments of calls are objects there."""
    given: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message),
    }
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            given[field] = value
    if message.tool_calls:
        given["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return given


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
