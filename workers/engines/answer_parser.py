"""One answer's text, taken apart as it comes: reasoning, content, tool calls.

The formats are the engine's business: it brings its own two parsers, which this class drives and whose
pieces it puts in order.

1. A chunk's text goes through the reasoning parser; what is no reasoning goes through the tool parser.
2. What a parser reads depends on where its pieces begin and end: an end of one call and the start of the
   next in one piece may leave a marker in the content. So pieces end at every character that marks may
   consist of. A parser also yields one step at a time; it is asked again until it has nothing more.
3. Calls are numbered from 0 as they appear, and named after the request, so that the same ids replayed in
   another worker give the same calls.
4. `end` releases what the parsers held back for a marker that cannot come any more.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from contracts.parsing import Detail, ToolCallDelta

MAX_STEPS = 256  # of the tool parser within one piece
_PIECES = re.compile(r"[<>\[\]{}|,\n]|[^<>\[\]{}|,\n]+")


class ReasoningSource(Protocol):
    """SGLang's ReasoningParser: (reasoning, content) of each piece."""

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str | None, str | None]:
        """Take the next piece."""

    def parse_stream_end(self) -> tuple[str | None, str | None]:
        """Return what was held back."""


class ToolSource(Protocol):
    """SGLang's FunctionCallParser: (content, calls) of each piece; a call has tool_index, name and parameters."""

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, Sequence[Any]]:
        """Take the next piece."""

    def parse_stream_end(self) -> tuple[str, Sequence[Any]]:
        """Return what was held back."""


class AnswerParser:
    """See the module's docstring."""

    def __init__(
        self,
        name: str,
        *,
        reasoning: ReasoningSource | None,
        tools: ToolSource | None,
        max_calls: int | None = None,
    ) -> None:
        """`name` is the same for every attempt at this answer; calls beyond `max_calls` are left out."""
        self.reasoning_tokens = 0
        self._name = name
        self._max_calls = max_calls
        self._reasoning = reasoning
        self._tools = tools
        self._in_reasoning = reasoning is not None
        self._indices: dict[int, int] = {}  # the parser's index of the open call -> ours
        self._num_calls = 0
        self._arguments: list[bool] = []  # per call: whether any came

    def take(self, text: str, num_tokens: int) -> tuple[str, Detail | None]:
        """Return the content of a chunk, and its reasoning and tool calls if it has any."""
        reasoning = ""
        if self._reasoning is not None:
            found, rest = self._reasoning.parse_stream_chunk(text)
            reasoning, text = found or "", rest or ""
            if self._in_reasoning:
                self._in_reasoning = not text
                self.reasoning_tokens += num_tokens if self._in_reasoning else 0
        calls: list[ToolCallDelta] = []
        if self._tools is not None and text:
            text = self._read_calls(text, calls)
        return text, _detail(reasoning, calls)

    def end(self, *, complete: bool) -> tuple[str, Detail | None]:
        """Return what was held back. `complete`: the model ended its answer itself."""
        reasoning = text = ""
        if self._reasoning is not None:
            found, rest = self._reasoning.parse_stream_end()
            reasoning, text = found or "", rest or ""
        calls: list[ToolCallDelta] = []
        if self._tools is not None:
            text = self._read_calls(text, calls)
            held, last = self._tools.parse_stream_end()
            text += held or ""
            self._add(last, calls)
            if (unsent := _unsent_arguments(self._tools)) and self._indices:
                self._add_arguments(self._num_calls - 1, unsent, calls)
            if complete and self._num_calls and not self._arguments[-1]:
                self._add_arguments(self._num_calls - 1, "{}", calls)
        return text, _detail(reasoning, calls)

    def _read_calls(self, text: str, into: list[ToolCallDelta]) -> str:
        assert self._tools is not None
        content: list[str] = []
        for piece in _PIECES.findall(text) or [""]:
            said, calls = self._tools.parse_stream_chunk(piece)
            content.append(said or "")
            for _ in range(MAX_STEPS):
                self._add(calls, into)
                if not any(call.name or call.parameters for call in calls):
                    break
                said, calls = self._tools.parse_stream_chunk("")
                content.append(said or "")
        return "".join(content)

    def _add(self, calls: Sequence[Any], into: list[ToolCallDelta]) -> None:
        for call in calls:
            if call.name and self._num_calls == self._max_calls:
                self._indices.pop(call.tool_index, None)
            elif call.name:
                index = self._indices[call.tool_index] = self._num_calls
                self._num_calls += 1
                self._arguments.append(False)
                into.append(ToolCallDelta(index=index, id=self._call_id(index), name=call.name))
            if call.parameters and (index := self._indices.get(call.tool_index, -1)) >= 0:
                self._add_arguments(index, call.parameters, into)

    def _add_arguments(self, index: int, arguments: str, into: list[ToolCallDelta]) -> None:
        if index >= 0:
            self._arguments[index] = True
            into.append(ToolCallDelta(index=index, arguments=arguments))

    def _call_id(self, index: int) -> str:
        return f"call_{hashlib.blake2b(f'{self._name}/{index}'.encode(), digest_size=12).hexdigest()}"


def _detail(reasoning: str, calls: list[ToolCallDelta]) -> Detail | None:
    return Detail(reasoning=reasoning, tool_calls=tuple(calls)) if reasoning or calls else None


def _unsent_arguments(source: ToolSource) -> str:
    """Return the arguments of the last call that SGLang's parser knows and has not yet yielded.

    Its own server looks for them in the same place when an answer ends.
    """
    detector = getattr(source, "detector", source)
    known, sent = getattr(detector, "prev_tool_call_arr", []), getattr(detector, "streamed_args_for_tool", [])
    last = len(known) - 1
    if last < 0 or last >= len(sent):
        return ""
    arguments = known[last].get("arguments", {})
    whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return whole[len(sent[last]) :] if whole.startswith(sent[last]) else ""
