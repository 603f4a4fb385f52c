"""Clocks that jump: processes under libfaketime, each with an offset of its own. The machine's clock is left alone.

Only the wall clock is offset; the monotonic one, by which every timer here runs, goes on as it does under NTP.
"""

import importlib.util
import platform
from pathlib import Path

_REREAD_S = 1


class Clocks:
    """An offset file for each process. Without the library `lacks` says so and nothing is preloaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = _library()
        self.names: set[str] = set()
        self.lacks = "" if self._library else "libfaketime is not there for this platform"

        folder.mkdir()

    def give(self, name: str) -> None:
        """Let a process have such a clock from its next start on; it shows the right time until it is set."""
        self.set(name, 0)
        self.names.add(name)

    def take(self, name: str) -> None:
        """Let a process have the machine's clock from its next start on."""
        self.names.discard(name)

    def set(self, name: str, offset_s: float) -> None:
        """Let a process's clock show the time plus an offset, from the next second on."""
        file = self._folder / name
        beside = file.with_suffix(".new")
        beside.write_text(f"{offset_s:+g}\n")
        beside.rename(file)

    def environ(self, name: str) -> list[str]:
        """Return the variables of a process, as `env` takes them."""
        return [
            f"LD_PRELOAD={self._library}",
            f"FAKETIME_TIMESTAMP_FILE={self._folder / name}",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            f"FAKETIME_CACHE_DURATION={_REREAD_S}",
            "FAKETIME_NO_CACHE=0",
        ]


def _library() -> Path | None:
    spec = importlib.util.find_spec("libfaketime")
    if spec is None or spec.origin is None or platform.system() != "Linux":
        return None
    found = sorted((Path(spec.origin).parent / "vendor/libfaketime/src").glob("libfaketime.so*"))
    return found[0] if found else None
