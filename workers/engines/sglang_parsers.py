"""SGLang's own parsers and grammars, as the engine uses them for one model.

Importing them takes seconds and half a gigabyte, so it happens in workers only, with the engine.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import xgrammar
from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from contracts.environment import SettingsError
from contracts.parsing import Grammar, Parsing
from workers.engine import Job
from workers.engines.answer_parser import AnswerParser, ReasoningSource, ToolSource
from workers.engines.sglang_features import ParserNames, bad, constraint_params
from workers.engines.sglang_options import SglangOptions
from workers.engines.token_bytes import TokenBytes

PARSERS: Final = ParserNames(
    tools=frozenset(FunctionCallParser.ToolCallParserEnum), reasoning=frozenset(ReasoningParser.DetectorMap)
)
_SOURCE_LINE: Final = re.compile(r"^(\[[\d:]+\] )?\S+\.cc:\d+: ")
_COMPILE: Final = {
    "json_schema": xgrammar.Grammar.from_json_schema,
    "regex": xgrammar.Grammar.from_regex,
    "ebnf": xgrammar.Grammar.from_ebnf,
    "structural_tag": xgrammar.Grammar.from_structural_tag,
}


class _JsonCalls:
    """Calls that a JSON schema forced into one array, in the shape of FunctionCallParser."""

    def __init__(self, tools: list[Any]) -> None:
        self.detector = JsonArrayParser()
        self._tools = tools

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[Any]]:
        """Take the next piece."""
        result = self.detector.parse_streaming_increment(chunk_text, self._tools)
        return result.normal_text, result.calls

    def parse_stream_end(self) -> tuple[str, list[Any]]:
        """Return what was held back."""
        result = self.detector.finish(self._tools)
        return result.normal_text, result.calls


class Anatomy(msgspec.Struct, frozen=True):
    """How one answer is forced into a form, and taken apart again."""

    params: Mapping[str, Any]  # sampling parameters
    parser: AnswerParser | None
    after_reasoning: bool  # the form begins where the reasoning ends


PLAIN: Final = Anatomy({}, None, after_reasoning=False)


def check_names(options: SglangOptions) -> None:
    """Stop the worker when the catalogue names a parser that SGLang does not have. Raises SettingsError."""
    for field, names, known in (
        ("tool_parser", options.tool_parsers, PARSERS.tools),
        ("reasoning_parser", {options.reasoning_parser} - {""}, PARSERS.reasoning),
    ):
        if unknown := sorted(names - known):
            raise SettingsError(
                f"WORKER_CATALOG: SGLang has no {field} {unknown[0]!r}; it has {', '.join(sorted(known))}"
            )


def anatomy(job: Job, tokenizer: Any) -> Anatomy:
    """Return what a job's grammar and parsing ask for. Raises Refusal, which names the parameter."""
    grammar, parsing = job.sampling.grammar, job.parsing
    if grammar is not None:
        check_grammar(grammar, grammar.kind if grammar.kind in ("regex", "ebnf") else "response_format")
    if parsing is None:
        return PLAIN
    tools, params = _tools(parsing, tokenizer)
    if params and grammar is not None:
        if parsing.tool_name or parsing.tool_choice == "required":
            raise bad("tool_choice", "a forced tool call and response_format exclude each other")
        params = {}  # the model may call or answer in the format; the format is what was asked for
    reasoning: ReasoningSource | None = None
    if parsing.reasoning_parser:
        reasoning = ReasoningParser(
            parsing.reasoning_parser,
            stream_reasoning=True,
            force_reasoning=True if parsing.reasoning_open else None,
            tokenizer=tokenizer,
            tool_call_parser_active=tools is not None,
        )
    if tools is not None:
        params = {**params, "skip_special_tokens": False}  # they mark the calls
    attempt = job.attempt
    parser = AnswerParser(
        f"{attempt.rid}/{attempt.sample}",
        reasoning=reasoning,
        tools=tools,
        max_calls=None if parsing.parallel_tool_calls else 1,
    )
    return Anatomy(params, parser, after_reasoning=bool(parsing.reasoning_parser) and parsing.reasoning_open)


def check_grammar(grammar: Grammar, parameter: str) -> None:
    """Refuse a grammar that the engine would fail to compile: on both sides of a pair, and late. Raises Refusal."""
    compile_grammar = _COMPILE.get(grammar.kind)
    if compile_grammar is None:
        return
    try:
        compile_grammar(grammar.text)
    except Exception as error:  # noqa: BLE001 - its C++ raises RuntimeError and more, all about the text
        raise bad(parameter, _SOURCE_LINE.sub("", str(error)).strip()[:500]) from None


def _tools(parsing: Parsing, tokenizer: Any) -> tuple[ToolSource | None, dict[str, Any]]:
    """Return what finds the calls, and the sampling parameters that make the model call if it must."""
    if not parsing.tools or (parsing.tool_choice == "none" and not parsing.tool_name):
        return None, {}
    if not parsing.tool_parser:
        raise bad("tools", "this model has no tool parser")
    try:
        tools = [Tool.model_validate(tool) for tool in json.loads(parsing.tools)]
    except ValueError as error:  # pydantic's and json's
        raise bad("tools", str(error)[:500]) from None
    choice: Any = parsing.tool_choice
    if parsing.tool_name:
        choice = ToolChoice(function={"name": parsing.tool_name})
        tools = [tool for tool in tools if tool.function.name == parsing.tool_name]
        if not tools:
            raise bad("tool_choice", f"there is no tool {parsing.tool_name!r}")
    for tool in tools:
        if tool.function.parameters is not None:
            check_grammar(Grammar("json_schema", json.dumps(tool.function.parameters)), "tools")
    forced = choice != "auto"
    if forced:
        tools = [_bound(tool) for tool in tools]
    parser = FunctionCallParser(tools, parsing.tool_parser, tokenizer=tokenizer, tool_choice=choice)
    constraint = parser.get_structure_constraint(choice, parallel_tool_calls=parsing.parallel_tool_calls)
    if forced and constraint is None and not parser.owns_tool_format():
        raise bad("tool_choice", f"the tool parser {parsing.tool_parser!r} cannot force a call")
    found: ToolSource = parser if not forced or parser.owns_tool_format() else _JsonCalls(tools)
    single = not parsing.parallel_tool_calls or bool(parsing.tool_name)
    return found, constraint_params(constraint, single=single)


def _bound(tool: Tool) -> Tool:
    """Return the tool with arguments that follow its schema, as SGLang binds those of every call that it forces.

    Without `strict` it would take any JSON in a parser's own format. No parameters means none, as in OpenAI's API.
    """
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    return tool.model_copy(
        update={"function": tool.function.model_copy(update={"strict": True, "parameters": parameters})}
    )


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str()).get("decoder") or {} if backend is not None else {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
    return TokenBytes(
        tokenizer.convert_ids_to_tokens,
        byte_level="ByteLevel" in kinds,
        added={token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()},
    )
