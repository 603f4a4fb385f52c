"""How late a process' event loop is: what every other latency in that process includes."""

import asyncio
from typing import Final

from contracts.beat import until_beat_s
from observability.metrics import Instruments

PERIOD_S: Final = 0.5


async def watch_loop_lag(instruments: Instruments) -> None:
    """Record twice a second how much later than asked a timer fires. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        wait_s = until_beat_s(PERIOD_S)
        due = loop.time() + wait_s
        await asyncio.sleep(wait_s)
        instruments.event_loop_lag(max(0.0, loop.time() - due) * 1000)
