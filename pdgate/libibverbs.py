"""libibverbs.so.1, which Mooncake loads even when it only uses TCP.

Where it is missing, the distribution's packages are fetched and unpacked beside the engine, without root.
"""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pdgate.commands import Commands
from pdgate.preflight import CannotStart

LIBRARY: Final = "libibverbs.so.1"
_PACKAGES: Final = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


async def ensure_libibverbs(folder: Path, commands: Commands) -> Mapping[str, str]:
    """Return the variables with which the worker finds libibverbs, unpacking it below `folder` if missing.

    Raises:
        CannotStart: it is missing and cannot be had without the user's help.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return {}
    if find_library(folder) is None:
        await _unpack_libibverbs(folder, commands)
    if find_library(folder) is None:
        raise CannotStart(_library_message("the package did not hold it"))
    return library_environment(folder)


def library_environment(folder: Path) -> Mapping[str, str]:
    """Return the variables with which a process finds what was unpacked below `folder`; none if nothing was."""
    folders = sorted({str(file.parent) for file in folder.rglob("*.so.*")})
    if not folders:
        return {}
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": ":".join([*folders, inherited] if inherited else folders)}


def find_library(folder: Path) -> Path | None:
    """Return the libibverbs that was unpacked below `folder`."""
    return next(folder.rglob(LIBRARY), None)


def _library_message(why: str) -> str:
    return (
        f"the engine needs {LIBRARY} ({why}): install it (Debian, Ubuntu: `apt-get install libibverbs1`;"
        " Fedora: `dnf install libibverbs`), or use --engine timed"
    )


async def _unpack_libibverbs(folder: Path, commands: Commands) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise CannotStart(_library_message("it is not on this machine"))
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    download = ("apt-get", "download", *_PACKAGES)
    fetched = await commands.succeeds(download, cwd=packages, timeout_s=120)
    if not fetched and os.geteuid() == 0:  # a fresh image has no package lists
        await commands.succeeds(("apt-get", "update"), cwd=packages, timeout_s=120)
        fetched = await commands.succeeds(download, cwd=packages, timeout_s=120)
    if not fetched:
        raise CannotStart(_library_message("`apt-get download` failed"))
    for package in packages.glob("*.deb"):
        await commands.succeeds(("dpkg", "-x", str(package), str(folder)), cwd=packages, timeout_s=60)
