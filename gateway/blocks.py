"""An answer cut into blocks: reasoning, text, tool calls. One block is open at a time.

Chat streams carry all of these side by side; Anthropic's messages and OpenAI's responses want each opened,
filled and closed. `Blocks` decides where one ends, a `BlockFramer` writes the events.
"""

import enum
from typing import Protocol

from contracts.parsing import Detail, TokenLogprob
from gateway.samples import Sample, joined


class Kind(enum.StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Block:
    """One block; `text` is a call's arguments."""

    __slots__ = ("_parts", "id", "index", "kind", "logprobs", "name")

    def __init__(self, kind: Kind, index: int, *, id: str = "", name: str = "") -> None:  # noqa: A002 - what the wire calls it
        self.kind = kind
        self.index = index
        self.id = id  # of a call
        self.name = name  # of a call's function
        self.logprobs: list[TokenLogprob] = []
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        """Append text."""
        self._parts.append(text)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)


class BlockFramer(Protocol):
    """Writes the events of blocks."""

    def block_opened(self, block: Block) -> None:
        """Write the beginning of a block."""
        ...

    def block_grew(self, block: Block, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Write a piece of a block; it is in the block already."""
        ...

    def block_closed(self, block: Block) -> None:
        """Write the end of a block."""
        ...


class Blocks:
    """The blocks of one answer."""

    def __init__(self, framer: BlockFramer) -> None:
        self.all: list[Block] = []
        self._framer = framer
        self._open: Block | None = None
        self._call = -1  # index of the tool call that is open, as the worker counts

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return sum(block.kind is Kind.CALL for block in self.all)

    def text(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """Add text. The hot path: once per token."""
        block = self._open
        if block is None or block.kind is not Kind.TEXT:
            block = self._begin(Kind.TEXT)
        self._grow(block, text, logprobs)

    def detailed(self, text: str, detail: Detail) -> None:
        """Add a chunk that is more than text."""
        if detail.reasoning:
            block = self._open
            if block is None or block.kind is not Kind.REASONING:
                block = self._begin(Kind.REASONING)
            self._grow(block, detail.reasoning, ())
        if text or (detail.logprobs and not detail.reasoning and not detail.tool_calls):
            self.text(text, detail.logprobs)
        for delta in joined(detail.tool_calls):
            block = self._open
            if block is None or block.kind is not Kind.CALL or delta.index != self._call:
                block = self._begin(Kind.CALL, id=delta.id, name=delta.name)
                self._call = delta.index
            if delta.arguments:
                self._grow(block, delta.arguments, ())

    def end(self) -> None:
        """Close what is open."""
        block, self._open = self._open, None
        if block is not None:
            self._framer.block_closed(block)

    def _begin(self, kind: Kind, *, id: str = "", name: str = "") -> Block:  # noqa: A002 - as in Block
        self.end()
        block = Block(kind, len(self.all), id=id, name=name)
        self.all.append(block)
        self._open = block
        self._framer.block_opened(block)
        return block

    def _grow(self, block: Block, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        block.add(text)
        block.logprobs += logprobs
        self._framer.block_grew(block, text, logprobs)


def blocks_of(sample: Sample) -> list[Block]:
    """Return the blocks of an answer that was not streamed: reasoning, text, calls."""
    found: list[Block] = []
    if sample.reasoning:
        found.append(Block(Kind.REASONING, 0))
        found[-1].add(sample.reasoning)
    if sample.text or not sample.tool_calls:
        found.append(Block(Kind.TEXT, len(found)))
        found[-1].add(sample.text)
        found[-1].logprobs += sample.logprobs
    for call in sample.tool_calls:
        found.append(Block(Kind.CALL, len(found), id=call.id, name=call.name))
        found[-1].add(call.arguments)
    return found
