"""The text of an answer that another worker began: where it goes on, to the character.

The engine gets prompt and answer so far as one prompt. Its own text would begin with the next token, and
be wrong there: a character may be split between two tokens at the cut, a stop string may begin before it
and end after it, and the client may have less text than its tokens make, since workers hold text back.
So the text is made here, from the ids:

1. `ContinuedText` decodes the delivered ids (`replay`) and then every new one, in windows that begin at
   whole characters, and looks for stop strings over the cut.
2. Both parts go through the answer's parsers, if it has any, as the first worker's did.
3. `Seam` drops what the client has: so many code points of whatever comes out.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from contracts.parsing import Detail, ToolCallDelta
from workers.engine import Job

CONTEXT_TOKENS: Final = 5
"""Of the prompt: the first token of an answer may depend on what stands before it, a space for instance."""

_SPLIT: Final = "\N{REPLACEMENT CHARACTER}"


class ContinuedText:
    """Text of one answer from its token ids, from the first one on."""

    def __init__(
        self, job: Job, prompt: Sequence[int], delivered: Sequence[int], decode: Callable[[list[int]], str]
    ) -> None:
        """`decode` is the tokenizer's, without special tokens."""
        self.stopped_by = ""
        """The stop string that ended the answer; its text, and all after it, is left out."""
        self._decode = decode
        self._stops = job.sampling.stop
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._begin, self._whole = 0, len(self._ids)  # of the window; up to where it is in the text already
        self._held = ""  # a stop string may have begun with it
        self._delivered = delivered

    def replay(self) -> Iterator[str]:
        """Yield the text of each delivered token; before the first `take`."""
        for token_id in self._delivered:
            text, self._held = self._held + self._add(token_id), ""
            yield self._without_held(text)

    def take(self, ids: Sequence[int], *, last: bool = False, hidden: int | None = None) -> str:
        """Return the text of further tokens. `last` releases what is incomplete; `hidden` ended the answer."""
        if ids and ids[-1] == hidden:
            ids = ids[:-1]
        text = "".join(self._add(token_id) for token_id in ids)
        if last:
            text += self._window()
            self._begin = self._whole = len(self._ids)
        return self._before_stop(text, last=last)

    def _add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._window()
        if not text or text.endswith(_SPLIT):
            return ""
        self._begin, self._whole = self._whole, len(self._ids)
        return text

    def _window(self) -> str:
        known = self._decode(self._ids[self._begin : self._whole])
        return self._decode(self._ids[self._begin :])[len(known) :]

    def _before_stop(self, text: str, *, last: bool) -> str:
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            return text[:at]
        self._held = ""
        return text if last else self._without_held(text)

    def _without_held(self, text: str) -> str:
        """Keep back what a stop string may begin with; longest first."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                self._held = text[-length:]
                return text[:-length]
        return text


class Seam:
    """Drops the first code points of a stream of text and details, in the order in which a chunk is read."""

    def __init__(self, num_chars: int) -> None:
        self._left = num_chars

    def after(self, text: str, detail: Detail | None) -> tuple[str, Detail | None]:
        """Return what of a chunk is new."""
        if not self._left:
            return text, detail
        reasoning = self._cut(detail.reasoning) if detail is not None else ""
        text = self._cut(text)
        if detail is None:
            return text, None
        calls = tuple(call for call in map(self._cut_call, detail.tool_calls) if call is not None)
        if not (reasoning or calls or detail.logprobs):
            return text, None
        return text, msgspec.structs.replace(detail, reasoning=reasoning, tool_calls=calls)

    def _cut_call(self, call: ToolCallDelta) -> ToolCallDelta | None:
        has_name = bool(call.name)
        name, arguments = self._cut(call.name), self._cut(call.arguments)
        if has_name and not name:
            return ToolCallDelta(index=call.index, arguments=arguments) if arguments else None
        return msgspec.structs.replace(call, arguments=arguments) if name or arguments else None

    def _cut(self, text: str) -> str:
        dropped = min(self._left, len(text))
        self._left -= dropped
        return text[dropped:]
