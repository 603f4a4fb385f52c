"""The timed engine's KV store: which full pages of prompts some worker has computed.

A page is named after all tokens up to its end, the tenant's salt and the model's revision. In a folder it is a
file that holds its name and, as a hole, as many bytes as the KV cache of a page has, so that a sweeper sees the
sizes of a real store. Without a folder the pages live in this process, for engines that share the object.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PAGE_TOKENS: Final = 16
_PAGE_BYTES: Final = 4 * PAGE_TOKENS
_NAME_BYTES: Final = 12
MAX_PAGES: Final = 100_000
"""In this process: the least recently used ones go first."""


class TimedStore:
    """A set of pages, shared by the engines of one pool."""

    def __init__(self, scope: str, *, folder: Path | None = None, page_kv_bytes: int = 4096) -> None:
        """`scope` keeps models and revisions apart. `page_kv_bytes`: KV cache of a page."""
        self._scope = scope
        self._folder = folder
        self._page_kv_bytes = max(_NAME_BYTES, page_kv_bytes)
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def match(self, ids: bytes, salt: str) -> tuple[int, bool]:
        """Return how many leading tokens of packed ids are stored, and whether all their pages are what they say.

        The last token is never counted: it is computed, since it yields the next one.
        """
        found, intact = 0, True
        for name in self._names(ids[:-4], salt):
            held = self._read(name)
            if held is None:
                break
            intact = intact and held == name
            found += PAGE_TOKENS
        return found, intact

    def add(self, ids: bytes, salt: str) -> None:
        """Store the full pages of packed ids."""
        for name in self._names(ids, salt):
            if self._read(name) is None:
                self._write(name)

    def clear(self) -> None:
        """Forget everything that lives in this process."""
        self._pages.clear()

    def _names(self, ids: bytes, salt: str) -> Iterator[bytes]:
        name = hashlib.blake2b(f"{len(self._scope)}:{self._scope}{salt}".encode(), digest_size=_NAME_BYTES).digest()
        for start in range(0, len(ids) - _PAGE_BYTES + 1, _PAGE_BYTES):
            name = hashlib.blake2b(name + ids[start : start + _PAGE_BYTES], digest_size=_NAME_BYTES).digest()
            yield name

    def _read(self, name: bytes) -> bytes | None:
        if self._folder is None:
            if name not in self._pages:
                return None
            self._pages.move_to_end(name)
            return name
        path = self._path(name)
        try:
            with path.open("rb") as file:
                held = file.read(_NAME_BYTES)
            os.utime(path)  # the sweeper goes by the last use
        except FileNotFoundError:
            return None
        return held

    def _write(self, name: bytes) -> None:
        if self._folder is None:
            self._pages[name] = None
            if len(self._pages) > MAX_PAGES:
                self._pages.popitem(last=False)
            return
        path = self._path(name)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        with unfinished.open("wb") as file:
            file.write(name)
            file.truncate(self._page_kv_bytes)
        unfinished.replace(path)

    def _path(self, name: bytes) -> Path:
        assert self._folder is not None
        return self._folder / f"{name.hex()}.page"
