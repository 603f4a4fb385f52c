"""When periodic loops of one process wake: together.

Each wake-up of an idle process costs more than what most loops do in it, so they share them, and calls to Redis that
begin in one turn share a write. Where one begins is the process's own: those of a machine must not wake at once, or a
request that comes then waits for all of them.
"""

import asyncio
import os
from typing import Final

_PHASE_S: Final = 0.1
_GOLDEN: Final = 0.6180339887
"""Its multiples, without their whole parts, lie far apart: what starts together has numbers that follow each other."""


async def beat(period_s: float) -> None:
    """Sleep until a multiple of the period on this process's clock; see `to_next_s`."""
    await asyncio.sleep(until_beat_s(period_s))


def until_beat_s(period_s: float) -> float:
    """Return how long `beat` would sleep."""
    phase_s = os.getpid() * _GOLDEN % 1 * _PHASE_S
    return to_next_s(asyncio.get_running_loop().time() + phase_s, period_s)


def to_next_s(now_s: float, period_s: float) -> float:
    """Return how far the first multiple of a period is that is more than half a period away."""
    left_s = period_s - now_s % period_s
    return left_s if left_s > period_s / 2 else left_s + period_s
