"""One answer of a request, as it collects: what bodies that are not streamed are made of."""

from collections.abc import Iterable

import msgspec

from contracts.lifecycle import FinishReason
from contracts.parsing import Detail, TokenLogprob, ToolCallDelta


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call so far. `arguments` is JSON text once the answer is whole."""

    id: str
    name: str
    arguments: str = ""


class Sample:
    """Text, reasoning, tool calls and log probabilities of one answer."""

    __slots__ = ("_calls", "_reasoning", "_text", "logprobs", "matched_stop", "reason")

    def __init__(self) -> None:
        self.reason: FinishReason | None = None
        self.matched_stop = ""  # the stop string that ended it
        self.logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    def piece(self, text: str) -> None:
        """Add text."""
        self._text.append(text)

    def detailed(self, text: str, detail: Detail) -> None:
        """Add a chunk that is more than text."""
        self._text.append(text)
        self._reasoning.append(detail.reasoning)
        self.logprobs += detail.logprobs
        for delta in detail.tool_calls:
            call = self._calls.setdefault(delta.index, ToolCall(id="", name=""))
            call.id += delta.id
            call.name += delta.name
            call.arguments += delta.arguments

    def finished(self, reason: FinishReason, matched_stop: str) -> None:
        """Note how the answer ended."""
        self.reason, self.matched_stop = reason, matched_stop

    @property
    def text(self) -> str:
        """The content: all that is neither reasoning nor a tool call."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning that the model's parser set apart."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls in order."""
        return [self._calls[index] for index in sorted(self._calls)]


def joined(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return the deltas of one chunk with those of the same call made one, since clients expect one each."""
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        before = calls.get(delta.index)
        if before is not None:
            delta = ToolCallDelta(  # noqa: PLW2901
                index=delta.index,
                id=before.id + delta.id,
                name=before.name + delta.name,
                arguments=before.arguments + delta.arguments,
            )
        calls[delta.index] = delta
    return list(calls.values())
