"""Kills what a stack leaves behind when its process dies without stopping it.

1. The stack starts this file first, in a session of its own, with a pipe as its standard input and
   the stack's lock file inherited, so that the next start waits until this one has finished.
2. For each child it writes `+ PGID` (or `+ PGID SIGNAL`, a signal to try for a second before
   SIGKILL), and `- PGID` once that group is gone.
3. However the stack ends, the kernel closes the pipe: whatever is still on the list is killed,
   grandchildren included, because each child leads its own process group.

Runs with the standard library only: it must start in milliseconds and cost next to nothing.
"""

import os
import signal
import sys
import time
from typing import TextIO

_FIRST_SIGNAL_S = 1.0
_WAIT_S = 5.0


def read_groups(lines: TextIO) -> dict[int, int]:
    """Return the groups still listed at the end of input, each with the signal to begin with."""
    groups: dict[int, int] = {}
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "+":
            groups[int(words[1])] = int(words[2]) if len(words) > 2 else signal.SIGKILL
        elif len(words) == 2 and words[0] == "-":
            groups.pop(int(words[1]), None)
    return groups


def send(group: int, number: int) -> bool:
    """Signal a group; return whether it still has members."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # members that are not ours to kill: a reused number
        return False
    return True


def kill(groups: dict[int, int]) -> None:
    """End every group: its own signal first, SIGKILL to what is left a second later."""
    left = {group for group, number in groups.items() if send(group, number)}
    started = time.monotonic()
    while left and time.monotonic() - started < _WAIT_S:
        time.sleep(0.01)
        late = time.monotonic() - started > _FIRST_SIGNAL_S
        left = {group for group in left if send(group, signal.SIGKILL if late else 0)}


def main() -> None:
    """Wait for the end of standard input, then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kill(read_groups(sys.stdin))


if __name__ == "__main__":
    main()
