"""Which full pages of prompts a timed engine has computed before, per cache salt; least recently used go first."""

from collections import OrderedDict


class PrefixCache:
    """A set of page-chain hashes. A page counts only together with all pages before it."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * 4
        self._page_size = page_size
        self._pages: OrderedDict[int, None] = OrderedDict()

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
        for page in self._chain(prompt, salt):
            self._pages[page] = None
            self._pages.move_to_end(page)

    def shrink_to(self, tokens: int) -> None:
        """Forget old pages until at most `tokens` are held."""
        while len(self._pages) * self._page_size > max(0, tokens):
            self._pages.popitem(last=False)

    def _chain(self, prompt: bytes, salt: str) -> list[int]:
        chained = hash(salt)
        pages = []
        for start in range(0, len(prompt) - self._page_bytes + 1, self._page_bytes):
            chained = hash((chained, prompt[start : start + self._page_bytes]))
            pages.append(chained)
        return pages
