"""Answers that are more than plain text: what they must match, how they are taken apart, and the pieces.

The engine's own parsers do the work in the worker; these values say what the gateway asks them for and
carry what they find. A request that uses none of this has no such value anywhere on its way.
"""

from typing import Literal

import msgspec

from contracts.v1 import worker_pb2 as pb


class Grammar(msgspec.Struct, frozen=True):
    """What the answer must match. `text` is the schema or pattern, empty for `json_object`."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str = ""


class Parsing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the worker takes an answer apart. Parser names are SGLang's; empty = that part stays in the text."""

    tool_parser: str = ""
    reasoning_parser: str = ""
    tools: str = ""  # JSON array, as in OpenAI's `tools`
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""  # the one function to call; wins over tool_choice
    parallel_tool_calls: bool = True
    reasoning_open: bool = False  # the prompt ends inside the reasoning


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a tool call; `id` and `name` come with the first one, `arguments` are joined."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its log probability. `token` is its own bytes, perhaps part of a character."""

    id: int
    logprob: float
    token: bytes
    top: tuple["TokenLogprob", ...] = ()


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk holds besides its text, in this order: reasoning, (text), tool calls; log probabilities of all."""

    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def num_chars(self) -> int:
        """Code points besides the text: where a continuation of the answer goes on is counted in them."""
        return len(self.reasoning) + sum(len(call.name) + len(call.arguments) for call in self.tool_calls)


_PARSING = Parsing.__struct_fields__


def parsing_to_pb(parsing: Parsing) -> pb.Parsing:
    """Return the protobuf form of how to take an answer apart."""
    return pb.Parsing(**{name: getattr(parsing, name) for name in _PARSING})


def parsing_from_pb(message: pb.Parsing) -> Parsing:
    """Return how to take an answer apart. Raises msgspec.ValidationError for an unknown tool choice."""
    given = {name: getattr(message, name) for name in _PARSING}
    return msgspec.convert({**given, "tool_choice": given["tool_choice"] or "auto"}, Parsing)


def detail_to_pb(entry: int, detail: Detail) -> pb.Detail:
    """Return the protobuf form of a chunk's detail, for the entry at that index."""
    return pb.Detail(
        entry=entry,
        reasoning=detail.reasoning,
        tool_calls=[
            pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in detail.tool_calls
        ],
        logprobs=[_logprob_to_pb(token) for token in detail.logprobs],
    )


def detail_from_pb(message: pb.Detail) -> Detail:
    """Return the detail in a message."""
    return Detail(
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ),
        logprobs=tuple(_logprob_from_pb(token) for token in message.logprobs),
    )


def _logprob_to_pb(token: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TokenLogprob(id=other.id, logprob=other.logprob, token=other.token) for other in token.top]
    return pb.TokenLogprob(id=token.id, logprob=token.logprob, token=token.token, top=top)


def _logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple(TokenLogprob(id=other.id, logprob=other.logprob, token=other.token) for other in message.top)
    return TokenLogprob(id=message.id, logprob=message.logprob, token=message.token, top=top)
