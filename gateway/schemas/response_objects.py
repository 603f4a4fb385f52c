"""The objects of OpenAI's responses API that the gateway writes: a response, its output items, its usage."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from contracts.parsing import TokenLogprob
from contracts.usage import UsageEvent
from gateway.blocks import Block, Kind
from gateway.schemas.answers import Served
from gateway.schemas.choices import logprobs_of
from gateway.schemas.responses import ResponsesRequest


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the input tokens."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it stands."""

    id: str
    created_at: int
    model: str
    status: str  # queued | in_progress | completed | incomplete | failed | cancelled
    output: Sequence[Mapping[str, Any]] = ()
    error: Mapping[str, Any] | None = None
    incomplete_details: Mapping[str, Any] | None = None
    usage: ResponseUsage | None = None
    completed_at: int | None = None
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Mapping[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Mapping[str, Any] = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: Mapping[str, Any] = {}
    tool_choice: Any = "auto"
    tools: Sequence[Mapping[str, Any]] = ()
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    user: str | None = None
    pdgate: Served | None = None
    object: str = "response"


def response_of(request: ResponsesRequest, *, response_id: str, created_s: int, model: str) -> Response:
    """Return the response to a request before anything is known of the answer."""
    text = request.text
    return Response(
        id=response_id,
        created_at=created_s,
        model=model,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": None,
        },
        safety_identifier=request.safety_identifier,
        service_tier=request.service_tier or "default",
        store=request.keeps,
        temperature=request.temperature,
        text={"format": (text.format if text else None) or {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or (),
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        user=request.user,
    )


def usage_of_response(event: UsageEvent) -> ResponseUsage:
    """Return the token counts of a settled request."""
    tokens = event.tokens
    return ResponseUsage(
        input_tokens=tokens.prompt,
        input_tokens_details=InputDetails(cached_tokens=tokens.prefill_cached),
        output_tokens=tokens.decode,
        output_tokens_details=OutputDetails(reasoning_tokens=event.reasoning_tokens),
        total_tokens=tokens.prompt + tokens.decode,
    )


def item_id(block: Block, rid: str) -> str:
    """Return the id of an output item."""
    prefix = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}[block.kind]
    return f"{prefix}_{rid}_{block.index}"


def item_of(block: Block, rid: str, *, status: str = "completed") -> dict[str, Any]:
    """Return a block as an output item; `status` in_progress = it has just begun."""
    began = status == "in_progress"
    match block.kind:
        case Kind.TEXT:
            content = [] if began else [part_of(block)]
            return {
                "id": item_id(block, rid),
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": content,
            }
        case Kind.REASONING:
            content = [] if began else [part_of(block)]
            return {"id": item_id(block, rid), "type": "reasoning", "summary": [], "content": content, "status": status}
        case Kind.CALL:
            return {
                "id": item_id(block, rid),
                "type": "function_call",
                "status": status,
                "call_id": block.id,
                "name": block.name,
                "arguments": "" if began else block.text,
            }


def part_of(block: Block, *, empty: bool = False) -> dict[str, Any]:
    """Return the one content part of a message or of reasoning."""
    text = "" if empty else block.text
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": [] if empty else response_logprobs(block.logprobs),
    }


def response_logprobs(tokens: Sequence[TokenLogprob]) -> Sequence[Any]:
    """Return log probabilities as responses have them: those of chats without the wrapper."""
    found = logprobs_of(tokens)
    return [] if found is None else found.content
