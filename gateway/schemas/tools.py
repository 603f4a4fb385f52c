"""Tools and response formats of a request, and what they ask the worker for. Shared by the endpoints that chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from contracts.catalog import Model
from contracts.errors import BadRequest
from contracts.parsing import Grammar, Parsing

MAX_TOOLS: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
MAX_FORMAT_DEPTH: Final = 64  # of brackets; compiling much deeper ones keeps an engine busy for seconds
MAX_FORMAT_CHARACTERS: Final = 64 * 1024


class FunctionSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool: a function, nothing else is supported."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(msgspec.Struct, frozen=True):
    """The name of a function."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """The one function to call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A JSON schema that the answer follows."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """What the answer must look like. `structural_tag` is SGLang's and XGrammar's own."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None  # of a structural tag


def grammar_of(response_format: ResponseFormat | None, *, regex: str | None, ebnf: str | None) -> Grammar | None:
    """Return what an answer must match. Raises BadRequest: more than one, or one too large."""
    found = [_grammar_of_format(response_format)] if response_format is not None else []
    found += [Grammar("regex", regex)] if regex is not None else []
    found += [Grammar("ebnf", ebnf)] if ebnf is not None else []
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise BadRequest("'response_format', 'regex' and 'ebnf' exclude each other.", param="response_format")
    if not grammars:
        return None
    check_size(grammars[0].text, "response_format" if grammars[0].kind not in ("regex", "ebnf") else grammars[0].kind)
    return grammars[0]


def _grammar_of_format(wanted: ResponseFormat) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_object")
    if wanted.type == "structural_tag":
        if wanted.format is None:
            raise BadRequest("Missing required parameter: 'response_format.format'.", param="response_format.format")
        return Grammar("structural_tag", _json({"type": "structural_tag", "format": wanted.format}))
    if wanted.json_schema is None:
        raise BadRequest(
            "Missing required parameter: 'response_format.json_schema'.", param="response_format.json_schema"
        )
    return Grammar("json_schema", _json(wanted.json_schema.schema or {}))


def check_size(text: str, param: str) -> None:
    """Raise BadRequest for a schema or a grammar that would keep an engine busy with compiling it."""
    if len(text) > MAX_FORMAT_CHARACTERS:
        raise BadRequest(f"'{param}' has {len(text)} characters; at most {MAX_FORMAT_CHARACTERS}.", param=param)
    depth = deepest = 0
    for character in text:
        if character in "{[(":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}])":
            depth -= 1
    if deepest > MAX_FORMAT_DEPTH:
        raise BadRequest(f"'{param}' is nested {deepest} deep; at most {MAX_FORMAT_DEPTH}.", param=param)


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Raise BadRequest when tools and choice do not fit together."""
    names = [tool.function.name for tool in tools or ()]
    if len(names) > MAX_TOOLS:
        raise BadRequest(f"'tools' takes up to {MAX_TOOLS} tools, got {len(names)}.", param="tools")
    if len(set(names)) < len(names):
        raise BadRequest("Two tools have the same name.", param="tools")
    if choice is None or choice == "none":
        return
    if not names:
        raise BadRequest("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise BadRequest(f"There is no tool '{choice.function.name}' in 'tools'.", param="tool_choice")


def called_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Sequence[Tool]:
    """Return the tools that the model is told about."""
    return tools or () if choice != "none" else ()


def parsing_of(
    name: str,
    model: Model,
    *,
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    reasoning_open: bool,
) -> Parsing | None:
    """Return how the worker takes an answer of the model apart, None when it is plain text.

    Raises:
        BadRequest: the model calls no tools, or they are too large.
    """
    called = called_tools(tools, choice)
    if called and not model.tool_parser:
        raise BadRequest(f"The model '{name}' calls no tools.", param="tools")
    if not called and not model.reasoning_parser:
        return None
    text = _json([msgspec.to_builtins(tool) for tool in called]) if called else ""
    check_size(text, "tools")
    return Parsing(
        tool_parser=model.tool_parser if called else "",
        reasoning_parser=model.reasoning_parser,
        tools=text,
        tool_choice="required" if choice == "required" else "auto",
        tool_name=choice.function.name if isinstance(choice, NamedChoice) else "",
        parallel_tool_calls=parallel is not False,
        reasoning_open=reasoning_open,
    )


_MAX_ID_DIGITS: Final = 10


def biases_of(logit_bias: dict[str, float] | None, *, vocabulary: int) -> dict[int, float]:
    """Return biases by token id. Raises BadRequest, which names the token."""
    biases: dict[int, float] = {}
    if logit_bias and len(logit_bias) > MAX_BIASES:
        raise BadRequest(f"'logit_bias' takes up to {MAX_BIASES} tokens.", param="logit_bias")
    for key, bias in (logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS and int(key) < vocabulary):
            raise BadRequest(f"'{key}' in 'logit_bias' is no token id of this model.", param="logit_bias")
        if not -100 <= bias <= 100:
            raise BadRequest(f"The bias of token {key} is not within -100 and 100.", param="logit_bias")
        biases[int(key)] = bias
    return biases


def top_logprobs_of(logprobs: bool | None, top_logprobs: int | None) -> int | None:  # noqa: FBT001 - OpenAI's pair
    """Return how many alternatives each token gets, None when no log probabilities are wanted. Raises BadRequest."""
    if top_logprobs is None:
        return 0 if logprobs else None
    if not logprobs:
        raise BadRequest("'top_logprobs' is only allowed with 'logprobs': true.", param="top_logprobs")
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"'top_logprobs' is within 0 and {MAX_TOP_LOGPROBS}.", param="top_logprobs")
    return top_logprobs


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
