"""Settlements that Redis could not take, on disk: a bounded file per gateway process.

Records are a 4-byte length and the msgpack of a `Closed`. A torn last record is ignored. The file is
locked while its gateway lives, so another gateway that starts adopts only the files of dead ones.
Appends reach the kernel, not the disk: they survive the process, and a power cut as far as Redis' own
AOF would.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import structlog

from gateway.terms import Closed

log = structlog.get_logger()

_LENGTH: Final = struct.Struct("<I")
_PATTERN: Final = "settlements-*.journal"
_decoder = msgspec.msgpack.Decoder(Closed)


class Journal:
    """The file of this process. Not for concurrent use."""

    def __init__(self, folder: Path, gateway_id: str, *, max_bytes: int) -> None:
        self._folder = folder
        self._path = folder / f"settlements-{gateway_id}.journal"
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self.num_records = 0
        self.num_dropped = 0

    def open(self) -> list[Closed]:
        """Create the file, adopt those of dead gateways, and return what they held.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w+b")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        adopted: list[Closed] = []
        for path in sorted(self._folder.glob(_PATTERN)):
            if path != self._path:
                adopted.extend(self._adopt(path))
        return adopted

    def append(self, closed: Closed) -> bool:
        """Write a record; False when the file is full or closed."""
        record = msgspec.msgpack.encode(closed)
        if self._file is None or self._file.tell() + len(record) + _LENGTH.size > self._max_bytes:
            self.num_dropped += 1
            return False
        self._file.write(_LENGTH.pack(len(record)) + record)
        self._file.flush()
        self.num_records += 1
        return True

    def read(self) -> list[Closed]:
        """Return every record."""
        return list(_records(self._path.read_bytes()))

    def clear(self) -> None:
        """Forget every record: all are settled."""
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
        self.num_records = 0

    def close(self) -> None:
        """Close the file and remove it if it is empty."""
        if self._file is None:
            return
        if self.num_records == 0:
            self._path.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _adopt(self, path: Path) -> list[Closed]:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return []  # its gateway lives
            found = list(_records(file.read()))
            if not all(self.append(closed) for closed in found):
                log.warning("journal_not_adopted", path=str(path), num_records=len(found))
                return []
            os.unlink(path)  # noqa: PTH108 - while the lock is held
        log.info("journal_adopted", path=str(path), num_records=len(found))
        return found


def _records(raw: bytes) -> Iterator[Closed]:
    position = 0
    while position + _LENGTH.size <= len(raw):
        (length,) = _LENGTH.unpack_from(raw, position)
        record = raw[position + _LENGTH.size : position + _LENGTH.size + length]
        if len(record) < length:
            return
        try:
            yield _decoder.decode(record)
        except msgspec.DecodeError as error:  # a gateway must start all the same
            log.error("journal_record_unreadable", num_bytes=length, error=str(error))  # noqa: TRY400 - data, not code
        position += _LENGTH.size + length
