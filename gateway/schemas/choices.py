"""One answer in OpenAI's chat shape: message, tool calls, log probabilities, finish reason."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from contracts.lifecycle import FinishReason
from contracts.parsing import TokenLogprob, ToolCallDelta
from gateway.samples import Sample


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool call calls. `arguments` is JSON text."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tool call."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: Sequence[int]


class TokenContent(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the answer with its log probability.

    `bytes` joined are the answer's text; `token` shows what is no whole character as U+FFFD.
    """

    token: str
    logprob: float
    bytes: Sequence[int]
    top_logprobs: Sequence[Alternative]


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log probabilities of an answer or of a chunk."""

    content: Sequence[TokenContent]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: Sequence[MessageToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of the answer."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: Logprobs | None = None


def choice_of(index: int, sample: Sample) -> Choice:
    """Return one collected answer."""
    text, calls = sample.text, sample.tool_calls
    message = AssistantMessage(
        content=text if text or not calls else None,
        reasoning_content=sample.reasoning or UNSET,
        tool_calls=[
            MessageToolCall(id=call.id, function=Function(name=call.name, arguments=call.arguments)) for call in calls
        ]
        or UNSET,
    )
    return Choice(
        index=index,
        message=message,
        finish_reason=finish_reason(sample.reason, len(calls)),
        logprobs=logprobs_of(sample.logprobs),
    )


def finish_reason(reason: FinishReason | None, num_calls: int) -> str:
    """Return OpenAI's word for how an answer ended."""
    if num_calls and reason is FinishReason.STOP:
        return "tool_calls"
    return reason or ""


def logprobs_of(tokens: Sequence[TokenLogprob]) -> Logprobs | None:
    """Return the log probabilities in OpenAI's shape, None when there are none."""
    if not tokens:
        return None
    return Logprobs(
        content=[
            TokenContent(
                token=_shown(token.token),
                logprob=token.logprob,
                bytes=list(token.token),
                top_logprobs=[
                    Alternative(token=_shown(other.token), logprob=other.logprob, bytes=list(other.token))
                    for other in token.top
                ],
            )
            for token in tokens
        ]
    )


def delta_of(call: ToolCallDelta) -> dict[str, Any]:
    """Return a piece of a tool call; id, type and name only where they are said first."""
    function = {"name": call.name} if call.name else {}
    first = {"id": call.id, "type": "function"} if call.id else {}
    return {"index": call.index, **first, "function": function | {"arguments": call.arguments}}


def _shown(token: bytes) -> str:
    return token.decode("utf-8", "replace")
