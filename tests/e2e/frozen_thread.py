"""One thread of a process that stands still while the others go on, by ptrace(2)."""

import ctypes
import os
from pathlib import Path

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_ALL_THREADS = 0x40000000  # __WALL of waitpid(2)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class FrozenThread:
    """A stopped thread. For one caller thread: only the one that froze it may bury it."""

    def __init__(self, pid: int, name: str) -> None:
        """Stop the thread of that name. Raises OSError where the kernel refuses, StopIteration when there is none."""
        tasks = Path(f"/proc/{pid}/task").iterdir()
        self._tid = next(int(task.name) for task in tasks if (task / "comm").read_text().strip() == name)
        for request in (_SEIZE, _INTERRUPT):
            if _libc.ptrace(request, self._tid, None, None) == -1:
                raise OSError(ctypes.get_errno(), "ptrace")
        os.waitpid(self._tid, _ALL_THREADS)

    def bury(self) -> None:
        """Take notice of its end. Until then its killed process stays a zombie."""
        while not os.WIFSIGNALED(os.waitpid(self._tid, _ALL_THREADS)[1]):
            pass
