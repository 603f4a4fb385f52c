"""Which full pages of prompts a timed engine has computed before, per cache salt.

What is worth least goes first, among equals what was used longest ago (workers.pins).
"""

from collections import OrderedDict

from contracts.prefix import BLOCK_TOKENS, prompt_blocks
from workers.engine import Job
from workers.kv_table import KvTable
from workers.pins import ORDINARY, Pins


class PrefixCache:
    """A set of page-chain hashes. A page counts only together with all pages before it."""

    def __init__(self, page_size: int, kv: KvTable | None = None, capacity_tokens: int = 0) -> None:
        """Make an empty cache of pages that divide a block; what blocks it holds goes into `kv`."""
        self._pins = Pins(capacity_tokens)
        self._kv = kv
        self._pages_per_block = BLOCK_TOKENS // page_size
        self._page_bytes = page_size * 4
        self._page_size = page_size
        # page -> name of the block it is part of, 0 = none; the warmed ones apart
        self._pages: OrderedDict[int, int] = OrderedDict()
        self._warmed: OrderedDict[int, int] = OrderedDict()

    def match(self, prompt: bytes, salt: str) -> int:
        """Return how many leading tokens are cached. The last token is always computed: it yields the next one."""
        cached = 0
        for page in self._chain(prompt[: max(0, len(prompt) - 4)], salt):
            held = self._warmed if page in self._warmed else self._pages
            if page not in held:
                break
            held.move_to_end(page)
            cached += self._page_size
        return cached

    def computed(self, job: Job) -> None:
        """Remember what a job computed, for what it is worth."""
        self.add(job.input, job.cache_salt, self._pins.value_of(job))

    def add(self, prompt: bytes, salt: str, value: int = ORDINARY) -> None:
        """Remember the full pages of a computed prompt, worth `value`."""
        pages = self._chain(prompt, salt)
        blocks: list[int] = []
        if self._kv is not None and pages and pages[-1] not in self._pages and pages[-1] not in self._warmed:
            blocks = prompt_blocks(prompt, self._kv.scope(adapter="", salt=salt))
            self._kv.stored("device", blocks)
        for index, page in enumerate(pages):
            number = index // self._pages_per_block
            held = self._warmed if value > ORDINARY or page in self._warmed else self._pages
            block = self._pages.pop(page, 0) or self._warmed.pop(page, 0)
            held[page] = blocks[number] if number < len(blocks) else block
            held.move_to_end(page)

    def shrink_to(self, tokens: int) -> None:
        """Forget old pages until at most `tokens` are held."""
        while (len(self._pages) + len(self._warmed)) * self._page_size > max(0, tokens):
            _, block = (self._pages or self._warmed).popitem(last=False)
            if block and self._kv is not None:
                self._kv.removed("device", (block,))

    def _chain(self, prompt: bytes, salt: str) -> list[int]:
        chained = hash(salt)
        pages = []
        for start in range(0, len(prompt) - self._page_bytes + 1, self._page_bytes):
            chained = hash((chained, prompt[start : start + self._page_bytes]))
            pages.append(chained)
        return pages
