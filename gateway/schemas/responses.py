"""OpenAI's `POST /v1/responses`: the body and its translation to a chat request."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from contracts.errors import BadRequest
from gateway.schemas.chat import ChatRequest, Count, Probability, decode_chat
from gateway.schemas.decoding import decode_body, refuse_unsupported

ROLES: Final = ("system", "developer", "user", "assistant")
_TEXT_PARTS: Final = ("input_text", "output_text", "text")


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of the input: a message, a call, what it gave, or reasoning. Which fields count depends on `type`."""

    type: str = "message"
    role: str | None = None
    content: Any = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Any = None


class TextOptions(msgspec.Struct, frozen=True):
    """What the text must look like."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """How much to think."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A responses request. A field that is null counts as absent."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # refused by name unless they ask for nothing:
    prompt: Any = None
    conversation: Any = None

    @property
    def keeps(self) -> bool:
        """Return whether the response may be retrieved later."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Return whether log probabilities were asked for."""
        return "message.output_text.logprobs" in (self.include or ())


_decoder = msgspec.json.Decoder(ResponsesRequest)


def decode_responses(body: bytes) -> ResponsesRequest:
    """Return the request in a body. Raises BadRequest; `param` names the field."""
    request = decode_body(body, _decoder)
    refuse_unsupported(
        {
            "prompt": request.prompt is not None,
            "conversation": request.conversation is not None,
            "truncation": request.truncation == "auto",
        }
    )
    if request.background and not request.keeps:
        raise BadRequest("'background' needs 'store': true: it is retrieved later.", param="background")
    if request.background and request.stream:
        raise BadRequest("'background' with 'stream' is not supported: retrieve the response.", param="stream")
    if not request.input:
        raise BadRequest("'input' must not be empty.", param="input")
    return request


def chat_of(request: ResponsesRequest, history: Sequence[Mapping[str, Any]]) -> tuple[ChatRequest, list[Any]]:
    """Return the chat request that means the same, and its conversation without the instructions.

    Args:
        request: what was asked.
        history: the conversation of the previous response, as chat messages.

    Raises:
        BadRequest: the input holds what is not supported.
    """
    conversation = [*history, *messages_of(request.input)]
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat: dict[str, Any] = {
        "model": request.model,
        "messages": [*system, *conversation],
        "max_completion_tokens": request.max_output_tokens,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": request.service_tier,
    }
    if request.tools:
        chat["tools"] = [_tool_of(i, tool) for i, tool in enumerate(request.tools)]
        chat["tool_choice"] = _choice_of(request.tool_choice)
        chat["parallel_tool_calls"] = request.parallel_tool_calls
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _format_of(request.text.format)
    if request.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return decode_chat(msgspec.json.encode(chat)), conversation


def messages_of(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return input items as chat messages. Raises BadRequest for what is not supported."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        match item.type:
            case "message":
                if item.role not in ROLES:
                    raise BadRequest(f"A message's role is one of {', '.join(ROLES)}.", param=f"{where}.role")
                found.append({"role": item.role, "content": _text_of(item.content, where=f"{where}.content")})
            case "function_call":
                _add_call(found, item, where=where)
            case "function_call_output":
                if item.call_id is None:
                    raise BadRequest("A function call's output needs 'call_id'.", param=f"{where}.call_id")
                content = _text_of(item.output, where=f"{where}.output")
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case "reasoning":
                pass  # models are not shown earlier reasoning
            case other:
                raise BadRequest(f"Input items of type '{other}' are not supported.", param=f"{where}.type")
    return found


def _add_call(found: list[dict[str, Any]], item: InputItem, *, where: str) -> None:
    """Add a call to the assistant's turn before it, or to a new one."""
    if item.call_id is None or item.name is None:
        raise BadRequest("A function call needs 'call_id' and 'name'.", param=where)
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    call = {"id": item.call_id, "type": "function", "function": function}
    if found and found[-1]["role"] == "assistant":
        found[-1].setdefault("tool_calls", []).append(call)
        found[-1]["content"] = found[-1]["content"] or None
    else:
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _text_of(content: Any, *, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("Content is a text or a list of parts.", param=where)
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise BadRequest(
                "Only text is supported: this model takes no images, audio or files.", param=f"{where}[{j}]"
            )
        texts.append(text)
    return "".join(texts)


def _tool_of(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"Tools of type '{tool.get('type')}' are not supported.", param=f"tools[{i}].type")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice_of(choice: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function":
        raise BadRequest(f"A tool choice of type '{choice.get('type')}' is not supported.", param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format_of(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return dict(given)
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: given[name] for name in names if given.get(name) is not None}}
