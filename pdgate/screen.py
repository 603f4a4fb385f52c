"""What `pdgate up` shows: a live line on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable
from typing import Final

import msgspec
from rich.console import Console
from rich.status import Status

_PLAIN_EVERY_S: Final = 5.0
_MB: Final = 1_000_000
_SHARE_TO_JUDGE: Final = 0.03


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a long step is. Bytes are of downloads and of what is written."""

    step: str
    done_bytes: int = 0
    total_bytes: int = 0  # an estimate; 0 = unknown
    elapsed_s: float = 0.0
    share: float | None = None  # of the whole time, 0.0 to 1.0; None = as the bytes say

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the rate so far; None while that cannot be said."""
        share = self.share
        if share is None:
            share = self.done_bytes / self.total_bytes if self.total_bytes else 0.0
        if share < _SHARE_TO_JUDGE or self.elapsed_s < 1.0:
            return None
        return self.elapsed_s * max(0.0, 1.0 - share) / share

    def __str__(self) -> str:
        parts = [self.step]
        if self.total_bytes:
            parts.append(f"{min(self.done_bytes, self.total_bytes) // _MB} of about {self.total_bytes // _MB} MB")
        elif self.done_bytes:
            parts.append(f"{self.done_bytes // _MB} MB")
        if (eta := self.eta_s) is not None:
            parts.append(f"ETA {duration(eta)}")
        elif self.elapsed_s >= 1.0:
            parts.append(duration(self.elapsed_s))
        return ", ".join(parts)


Report = Callable[[Progress], None]


def duration(seconds: float) -> str:
    """Return seconds as people say them: `42 s`, `3 min 05 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


class Screen:
    """Lines that stay, and one line of progress. A reader that went away stops nothing."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._live: Status | None = None
        self._step = ""
        self._shown_at = 0.0

    def say(self, line: str) -> None:
        """Print one line that stays."""
        with contextlib.suppress(OSError):
            self._console.print(line, markup=False)

    def progress(self, now: Progress) -> None:
        """Show how far a step is: at once on a terminal, every 5 s and at each new step elsewhere."""
        with contextlib.suppress(OSError):
            if self._console.is_terminal:
                if self._live is None:
                    self._live = self._console.status("")
                    self._live.start()
                self._live.update(str(now))
            elif now.step != self._step or time.monotonic() - self._shown_at >= _PLAIN_EVERY_S:
                self._console.print(f"  {now}", markup=False)
                self._shown_at = time.monotonic()
            self._step = now.step

    def clear(self) -> None:
        """Take the line of progress away."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
        self._step = ""
