"""The folder that SGLang's sockets and files of one worker go to, so that nothing stays behind."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import psutil

_PREFIX: Final = "pdgate-engine-"


def make_scratch() -> str:
    """Make this process's folder, and remove those of workers that were killed and could not do it themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
