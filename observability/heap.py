"""What a serving process does about its heap: glibc's arenas, and Python's collector.

1. `begin`, before any thread: few malloc arenas. By default each thread that allocates beside another gets one, up to
   eight per core, and what is freed in one is of no use to the others.
2. `settle`, once everything is imported and built: what lives until the end of the process is left out of every
   later collection, and what starting took goes back to the system.
"""

import ctypes
import gc
from typing import Final

_M_ARENA_MAX: Final = -8  # mallopt(3)
_ARENAS: Final = 2
_NEW_OBJECTS: Final = 10_000
"""Objects that come before the youngest are looked through. A request makes some hundreds and few cycles."""


def begin() -> None:
    """Limit malloc's arenas, where the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _ARENAS)


def settle() -> None:
    """Collect once, then leave what is there alone for good."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
