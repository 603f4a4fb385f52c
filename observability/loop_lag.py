"""How late a process' event loop is: what every other latency in that process includes."""

import asyncio
from typing import Final

from observability.metrics import Instruments

PERIOD_S: Final = 0.5


async def watch_loop_lag(instruments: Instruments) -> None:
    """Record twice a second how much later than asked a timer fires. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        instruments.event_loop_lag(max(0.0, loop.time() - due) * 1000)
