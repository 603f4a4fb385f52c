"""A folder for stacks of real processes."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def stack_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-stack-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
