"""Small file systems that can be filled: a tmpfs for each of PostgreSQL, Valkey and the journals. Needs root."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

SIZES_MB = {"postgres": 384, "valkey": 96, "journals": 32}
_BALLOON = "balloon"
_PAGE_BYTES = 4096


class Disks:
    """Mounts, by name. `close` unmounts; where mounting is not allowed they are plain folders, and `lacks` says why."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mounted: list[Path] = []
        self.lacks = ""
        for name, size_mb in SIZES_MB.items():
            folder = root / name
            folder.mkdir(parents=True)
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=755", f"pdgate-{name}", str(folder)],
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode == 0:
                self._mounted.append(folder)
            else:
                self.lacks = f"no file system of its own can be mounted: {done.stderr.strip()}"

    def folder(self, name: str) -> Path:
        """Return where a disk is."""
        return self._root / name

    def fill(self, name: str) -> None:
        """Leave no byte of it."""
        space = os.statvfs(self.folder(name))
        with (self.folder(name) / _BALLOON).open("wb") as balloon, suppress(OSError):
            os.posix_fallocate(balloon.fileno(), 0, space.f_bavail * space.f_frsize)
        with (self.folder(name) / _BALLOON).open("ab", buffering=0) as balloon, suppress(OSError):
            while balloon.write(bytes(_PAGE_BYTES)):  # whatever was freed or taken in between
                pass

    def empty(self, name: str) -> None:
        """Undo it."""
        (self.folder(name) / _BALLOON).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount all; what is still busy goes when its last user does."""
        for folder in self._mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
