"""NVIDIA Dynamo's mocker, in an environment of its own: a process that answers JSON, line by line.

The environments are made by `benches.peers.environments`: `dynamo` has the mocker alone, `dynamo-planner` an older
release whose planner runs, too. Nothing of the product imports them, and they import of ours only what is pure.
"""

import subprocess
import tempfile

from benches.peers.environments import environment
from tests.processes import REPOSITORY

MOCKER, WITH_PLANNER = "dynamo", "dynamo-planner"


class MockerFailed(RuntimeError):
    """The process has ended; the message holds its last words."""


class Mocker:
    """The other environment's process, running one of our modules."""

    def __init__(self, module: str, *, peer: str = MOCKER, python: str | None = None) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [python or str(environment(peer) / "python"), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            cwd=REPOSITORY,
            env={"PYTHONPATH": str(REPOSITORY), "DYN_LOG": "error"},
        )

    def ask(self, question: str) -> str:
        """Return the answer to a line. Raises MockerFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise MockerFailed(self._last_words()) from None
        answer = self._process.stdout.readline()
        if not answer:
            raise MockerFailed(self._last_words())
        return answer

    def end(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._words.close()

    def _last_words(self) -> str:
        self._process.wait(30)
        self._words.seek(0)
        return self._words.read().decode(errors="replace")[-2000:]
