"""From an engine's cache pages to the blocks of contracts.prefix; needs no engine to test.

An engine names its pages itself and says of each which page it follows. Pages are shorter than our blocks, or as long;
a block is there as long as the page that completes it is.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from contracts.prefix import BLOCK_TOKENS, next_block
from contracts.wire import pack_ids

_BLOCK_BYTES = 4 * BLOCK_TOKENS


class _Page(NamedTuple):
    block: int  # name of the last whole block up to here, or the scope
    rest: bytes  # packed tokens since then
    tiers: int  # bits: where the page is


class PageBlocks:
    """The pages that an engine holds now, and what block each completes. Bounded by the engine's own cache."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self.num_orphans = 0
        """Pages without a known page before them: their blocks have no name."""

    def __len__(self) -> int:
        return len(self._pages)

    def stored(
        self, pages: Sequence[int], parent: int | None, token_ids: Sequence[int], page_size: int, scope: int, tier: int
    ) -> list[int]:
        """Take new pages, one after the other behind `parent` (None = the prompt's start); return completed blocks.

        Args:
            pages: the engine's names.
            parent: the engine's name of the page before the first.
            token_ids: of all pages together.
            page_size: tokens of a page; the last may be shorter, then it completes nothing and nothing follows it.
            scope: what the names of the prompt's blocks begin with.
            tier: one bit.
        """
        if parent is None:
            block, rest = scope, b""
        elif (before := self._pages.get(parent)) is not None:
            block, rest = before.block, before.rest
        else:
            self.num_orphans += len(pages)
            return []
        completed = []
        for index, page in enumerate(pages):
            rest += pack_ids(token_ids[index * page_size : (index + 1) * page_size])
            while len(rest) >= _BLOCK_BYTES:
                block, rest = next_block(block, rest[:_BLOCK_BYTES]), rest[_BLOCK_BYTES:]
                if not rest:
                    completed.append(block)
            known = self._pages.get(page)
            self._pages[page] = _Page(block, rest, tier | (known.tiers if known is not None else 0))
        return completed

    def removed(self, pages: Iterable[int], tier: int) -> list[int]:
        """Take pages that left a tier; return the blocks that they completed."""
        gone = []
        for page in pages:
            known = self._pages.get(page)
            if known is None:
                continue
            if not known.rest:
                gone.append(known.block)
            if left := known.tiers & ~tier:
                self._pages[page] = known._replace(tiers=left)
            else:
                del self._pages[page]
        return gone

    def clear(self) -> None:
        """Forget all pages."""
        self._pages.clear()
