"""Which full pages of prompts a timed engine has computed before, per cache salt; least recently used go first."""

from collections import OrderedDict

from contracts.prefix import BLOCK_TOKENS, prompt_blocks
from workers.kv_table import KvTable


class PrefixCache:
    """A set of page-chain hashes. A page counts only together with all pages before it."""

    def __init__(self, page_size: int, kv: KvTable | None = None) -> None:
        """Make an empty cache of pages that divide a block; what blocks it holds goes into `kv`."""
        self._kv = kv
        self._pages_per_block = BLOCK_TOKENS // page_size
        self._page_bytes = page_size * 4
        self._page_size = page_size
        self._pages: OrderedDict[int, int] = OrderedDict()  # page -> name of the block it is part of, 0 = none

    def match(self, prompt: bytes, salt: str) -> int:
        """Return how many leading tokens are cached. The last token is always computed: it yields the next one."""
        cached = 0
        for page in self._chain(prompt[: max(0, len(prompt) - 4)], salt):
            if page not in self._pages:
                break
            self._pages.move_to_end(page)
            cached += self._page_size
        return cached

    def add(self, prompt: bytes, salt: str) -> None:
        """Remember the full pages of a computed prompt."""
        pages = self._chain(prompt, salt)
        blocks: list[int] = []
        if self._kv is not None and pages and pages[-1] not in self._pages:
            blocks = prompt_blocks(prompt, self._kv.scope(adapter="", salt=salt))
            self._kv.stored("device", blocks)
        for index, page in enumerate(pages):
            number = index // self._pages_per_block
            if number < len(blocks):
                self._pages[page] = blocks[number]
            else:
                self._pages.setdefault(page, 0)
            self._pages.move_to_end(page)

    def shrink_to(self, tokens: int) -> None:
        """Forget old pages until at most `tokens` are held."""
        while len(self._pages) * self._page_size > max(0, tokens):
            _, block = self._pages.popitem(last=False)
            if block and self._kv is not None:
                self._kv.removed("device", (block,))

    def _chain(self, prompt: bytes, salt: str) -> list[int]:
        chained = hash(salt)
        pages = []
        for start in range(0, len(prompt) - self._page_bytes + 1, self._page_bytes):
            chained = hash((chained, prompt[start : start + self._page_bytes]))
            pages.append(chained)
        return pages
