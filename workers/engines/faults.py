"""Faults on demand, for tests and chaos runs: words in a control file that switch engine faults on."""

import time
from pathlib import Path

HANG = "hang"  # no step ends
DROP_KV = "drop_kv"  # the hand-off arrives without its payload
CORRUPT_KV = "corrupt_kv"  # the hand-off arrives damaged, which the receiver's checksum shows (timed engine)
LOSE_HAND_OFF = "lose_hand_off"  # the hand-off never arrives
REFUSE_SWITCH = "refuse_switch"  # a role change is refused, the old role stays
BUSY_SWITCH = "busy_switch"  # work is left in the engine that nobody waits for: a role change must be asked for again
FAIL_SWITCH = "fail_switch"  # a role change leaves the engine without a role
KNOWN = frozenset({HANG, DROP_KV, CORRUPT_KV, LOSE_HAND_OFF, REFUSE_SWITCH, BUSY_SWITCH, FAIL_SWITCH})
_REREAD_S = 0.05


class Faults:
    """The faults that are on: those set here, and the words in `file`, read at most 20 times a second."""

    def __init__(self, file: Path | None = None) -> None:
        self.on: set[str] = set()
        self._file = file
        self._from_file: frozenset[str] = frozenset()
        self._read_at_s = float("-inf")

    def has(self, fault: str) -> bool:
        """Whether `fault` is on."""
        if fault in self.on:
            return True
        if self._file is None:
            return False
        now_s = time.monotonic()
        if now_s - self._read_at_s > _REREAD_S:
            self._read_at_s = now_s
            try:
                self._from_file = frozenset(self._file.read_text().split())
            except FileNotFoundError:
                self._from_file = frozenset()
        return fault in self._from_file

    def payload(self, kv: bytes) -> bytes:
        """Return what arrives of a KV cache that is handed over."""
        if self.has(DROP_KV):
            return bytes(len(kv))
        return bytes(byte ^ 0xFF for byte in kv) if self.has(CORRUPT_KV) else kv
