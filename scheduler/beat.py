"""When periodic loops of one process wake: together.

Each wake-up of an idle process costs more than what most loops do in it, so they share them, and calls to Redis that
begin in one turn share a write. Where one begins is the process's own: many on a machine must not wake at once.
"""

import asyncio
import os
from typing import Final

_PHASE_S: Final = 0.1


async def beat(period_s: float) -> None:
    """Sleep until the next multiple of the period, on a clock that is this process's own; half a period at least."""
    now_s = asyncio.get_running_loop().time() + os.getpid() % 97 / 97 * _PHASE_S
    wait_s = period_s - now_s % period_s
    await asyncio.sleep(wait_s if wait_s > period_s / 2 else wait_s + period_s)
