"""Anthropic's `POST /v1/messages`: the body, its translation to a chat request, and the answer."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from contracts.errors import BadRequest, ServingError
from contracts.lifecycle import FinishReason
from contracts.usage import UsageEvent
from gateway.samples import Sample
from gateway.schemas.answers import Served, Telling, served_of
from gateway.schemas.chat import ChatRequest, Count, decode_chat
from gateway.schemas.decoding import decode_body, stops_of


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: "str | list[TextBlock | ImageBlock | DocumentBlock] | None" = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Earlier reasoning, sent back; models are not shown it again."""

    thinking: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Earlier reasoning, sent back encrypted."""


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """A picture: recognised in order to be refused by name."""


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """A document: recognised in order to be refused by name."""


ContentBlock = (
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ImageBlock | DocumentBlock
)


class MessageParam(msgspec.Struct, frozen=True):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class ToolParam(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None  # null or "custom"; servers' own tools are refused
    strict: bool | None = None  # calls must match the schema


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Who the end user is."""

    user_id: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A messages request."""

    model: str
    messages: Annotated[list[MessageParam], msgspec.Meta(min_length=1)]
    max_tokens: Count
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None  # accepted: whether a model thinks is its own affair
    service_tier: str | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A count_tokens request."""

    model: str
    messages: Annotated[list[MessageParam], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """How long a prompt is."""

    input_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. Cached tokens are not part of `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole message."""

    id: str
    model: str
    content: Sequence[Mapping[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    pdgate: Served
    type: str = "message"
    role: str = "assistant"


_messages = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountRequest)


def decode_messages(body: bytes) -> MessagesRequest:
    """Return the request in a body. Raises BadRequest; `param` names the field."""
    request = decode_body(body, _messages)
    stops_of(request.stop_sequences, field="stop_sequences")
    return request


def decode_count(body: bytes) -> CountRequest:
    """Return the request in a body. Raises BadRequest; `param` names the field."""
    return decode_body(body, _count)


def chat_of(request: MessagesRequest | CountRequest) -> ChatRequest:
    """Return the chat request that means the same. Raises BadRequest."""
    chat: dict[str, Any] = {"model": request.model, "messages": _messages_of(request)}
    if request.tools:
        chat["tools"] = [_tool_of(i, tool) for i, tool in enumerate(request.tools)]
        if request.tool_choice is not None:
            chat["tool_choice"] = _choice_of(request.tool_choice)
            if request.tool_choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
    if isinstance(request, MessagesRequest):
        chat |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "user": request.metadata.user_id if request.metadata else None,
            "service_tier": request.service_tier,
        }
    return decode_chat(msgspec.json.encode(chat))


def _messages_of(request: MessagesRequest | CountRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if request.system:
        system = request.system
        found.append(
            {"role": "system", "content": system if isinstance(system, str) else "\n".join(b.text for b in system)}
        )
    for i, message in enumerate(request.messages):
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        else:
            found += _turn(message.role, message.content, where=f"messages[{i}].content")
    return found


def _turn(role: str, blocks: Sequence[ContentBlock], *, where: str) -> list[dict[str, Any]]:
    """Return the chat messages of one turn: a user's turn may hold results of several calls."""
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    for j, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ToolUseBlock(id=call_id, name=name, input=given):
                function = {"name": name, "arguments": msgspec.json.encode(given).decode()}
                calls.append({"id": call_id, "type": "function", "function": function})
            case ToolResultBlock():
                content = _result_text(block, where=f"{where}[{j}]")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case ImageBlock() | DocumentBlock():
                raise _only_text(f"{where}[{j}]")
            case _:
                pass  # reasoning of earlier turns
    turn: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        turn |= {"tool_calls": calls, "content": turn["content"] or None}
    return [*results, turn] if texts or calls or not results else results


def _result_text(block: ToolResultBlock, *, where: str) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    for part in block.content:
        if not isinstance(part, TextBlock):
            raise _only_text(where)
    return "".join(part.text for part in block.content if isinstance(part, TextBlock))


def _only_text(where: str) -> BadRequest:
    return BadRequest("Only text is supported: this model takes no images or documents.", param=where)


def _tool_of(i: int, tool: ToolParam) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise BadRequest(f"Tools of type '{tool.type}' are not supported.", param=f"tools[{i}].type")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice_of(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("Missing required parameter: 'tool_choice.name'.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def usage_of_message(event: UsageEvent) -> MessageUsage:
    """Return the token counts of a settled request in Anthropic's split."""
    return MessageUsage(
        input_tokens=event.tokens.prefill_computed,
        cache_read_input_tokens=event.tokens.prefill_cached,
        output_tokens=event.tokens.decode,
    )


def stop_reason_of(reason: FinishReason | None, matched_stop: str, num_calls: int) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if reason is FinishReason.LENGTH:
        return "max_tokens", None
    if num_calls:
        return "tool_use", None
    return ("stop_sequence", matched_stop) if matched_stop else ("end_turn", None)


def message_of(
    samples: Sequence[Sample], event: UsageEvent, *, message_id: str, model: str, telling: Telling
) -> MessageAnswer:
    """Return a whole message."""
    (sample,) = samples
    calls = sample.tool_calls
    content: list[dict[str, Any]] = []
    if sample.reasoning:
        content.append({"type": "thinking", "thinking": sample.reasoning, "signature": ""})
    if sample.text:
        content.append({"type": "text", "text": sample.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call.arguments)} for call in calls
    ]
    stop_reason, stop_sequence = stop_reason_of(sample.reason, sample.matched_stop, len(calls))
    return MessageAnswer(
        id=message_id,
        model=model,
        content=content,
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=usage_of_message(event),
        pdgate=served_of(event, telling),
    )


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; what the model left unfinished or malformed is kept as text."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"_raw": text}
    return found if isinstance(found, dict) else {"_raw": text}


_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: ServingError, rid: str | None = None) -> Mapping[str, Any]:
    """Return Anthropic's error object. `code` and `param` are ours, beside its fields."""
    kind = _ERROR_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    detail = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return {"type": "error", "error": detail, "request_id": rid}
