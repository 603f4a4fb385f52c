"""Sending response bytes from wherever they arise, without waking a task for each.

ASGI's `send` is awaitable, but a server that has room finishes it at once. `Pump` runs it to its first
suspension in the caller's own call; only when the server makes it wait (backpressure) does the response's
task finish it. With 256 streams this saves one task switch per token (5 of 13 us CPU in the gateway's own
thread, `python -m benches`).
"""

from collections.abc import Awaitable, Callable, Generator
from typing import Any

Send = Callable[[Any], Awaitable[None]]


class Suspended:
    """A call of `send` that could not finish at once. Awaiting it goes on where it stopped."""

    def __init__(self, first: Any, rest: Generator[Any, None, None]) -> None:
        self._first = first
        self._rest = rest

    def __await__(self) -> Generator[Any, None, None]:
        yield self._first  # what the call waits for: the task that awaits us waits for it instead
        yield from self._rest


def begin(sending: Awaitable[None]) -> Suspended | None:
    """Run an awaitable to its end, if it does not have to wait; otherwise return the rest of it."""
    steps = sending.__await__()
    try:
        first = next(steps)
    except StopIteration:
        return None
    return Suspended(first, steps)
