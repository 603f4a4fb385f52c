"""Keeps the file store within its bytes: least recently used pages go first, whoever wrote them.

Every worker of a machine runs a sweeper, and a lock on the folder lets one of them sweep at a time, so the
store is swept as long as any of them lives. What is removed while somebody reads it is computed again there.
"""

import asyncio
import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import structlog

log = structlog.get_logger()

PERIOD_S: Final = 5.0
SWEEP_TO: Final = 0.9
"""Share of the bound that a sweep leaves, so that it does not begin again at once."""
UNFINISHED_S: Final = 60.0
"""Age from which a temporary file belongs to a writer that is gone."""


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What one sweep found and did. Bytes are those of the files' contents."""

    num_bytes: int  # left
    num_pages: int  # left
    removed_bytes: int


class StoreSweeper:
    """Sweeps one folder tree. `run` until cancelled."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        period_s: float = PERIOD_S,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.last = Swept(num_bytes=0, num_pages=0, removed_bytes=0)
        self._folder = folder
        self._max_bytes = max_bytes
        self._period_s = period_s
        self._now_unix_s = now_unix_s
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-sweeper")

    async def run(self) -> None:
        """Sweep again and again. Faults of the disk are logged, and the next sweep tries again."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    swept = await loop.run_in_executor(self._disk, self.sweep)
                except OSError as error:
                    log.warning("store_sweep_failed", folder=str(self._folder), error=str(error))
                else:
                    if swept is not None and swept.removed_bytes:
                        log.info("store_swept", removed_bytes=swept.removed_bytes, left_bytes=swept.num_bytes)
                await asyncio.sleep(self._period_s)
        finally:
            self._disk.shutdown(wait=False, cancel_futures=True)

    def sweep(self) -> Swept | None:
        """Sweep once; None while another worker sweeps. Blocking. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".sweeper").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            self.last = self._sweep()
            return self.last

    def _sweep(self) -> Swept:
        pages = sorted(self._pages())
        total = sum(size for _, size, _ in pages)
        removed, num_left = 0, len(pages)
        if total > self._max_bytes:
            target = int(self._max_bytes * SWEEP_TO)
            for _, size, path in pages:
                if total - removed <= target:
                    break
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                removed += size
                num_left -= 1
        return Swept(num_bytes=total - removed, num_pages=num_left, removed_bytes=removed)

    def _pages(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last use as Unix s, bytes, path) of each page; remove what writers left unfinished."""
        now_unix_s = self._now_unix_s()
        for path in self._folder.rglob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if not path.is_file() or path.name == ".sweeper":
                continue
            if path.suffix == ".tmp":
                if now_unix_s - stat.st_mtime > UNFINISHED_S:
                    path.unlink(missing_ok=True)
                continue
            yield max(stat.st_mtime, stat.st_atime), stat.st_size, path
