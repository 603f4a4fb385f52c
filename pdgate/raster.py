"""A small RGB picture: lines, a built-in 3 x 5 pixel font, and PNG out. For plots without a plotting library."""

import itertools
import struct
import zlib
from collections.abc import Sequence

_SCALE = 2
_ADVANCE = 4 * _SCALE
# Rows of each glyph from the top, three bits each.
_GLYPHS = {
    "0": (7, 5, 5, 5, 7), "1": (2, 6, 2, 2, 7), "2": (7, 1, 7, 4, 7), "3": (7, 1, 7, 1, 7), "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7), "6": (7, 4, 7, 5, 7), "7": (7, 1, 2, 2, 2), "8": (7, 5, 7, 5, 7), "9": (7, 5, 7, 1, 7),
    "A": (2, 5, 7, 5, 5), "B": (6, 5, 6, 5, 6), "C": (3, 4, 4, 4, 3), "D": (6, 5, 5, 5, 6), "E": (7, 4, 6, 4, 7),
    "F": (7, 4, 6, 4, 4), "G": (3, 4, 5, 5, 3), "H": (5, 5, 7, 5, 5), "I": (7, 2, 2, 2, 7), "J": (1, 1, 1, 5, 2),
    "K": (5, 5, 6, 5, 5), "L": (4, 4, 4, 4, 7), "M": (5, 7, 7, 5, 5), "N": (6, 5, 5, 5, 5), "O": (2, 5, 5, 5, 2),
    "P": (6, 5, 6, 4, 4), "Q": (2, 5, 5, 3, 1), "R": (6, 5, 6, 5, 5), "S": (3, 4, 2, 1, 6), "T": (7, 2, 2, 2, 2),
    "U": (5, 5, 5, 5, 7), "V": (5, 5, 5, 5, 2), "W": (5, 5, 7, 7, 5), "X": (5, 5, 2, 5, 5), "Y": (5, 5, 2, 2, 2),
    "Z": (7, 1, 2, 4, 7), ".": (0, 0, 0, 0, 2), ",": (0, 0, 0, 2, 4), "%": (5, 1, 2, 4, 5), "/": (1, 1, 2, 4, 4),
    "-": (0, 0, 7, 0, 0), "+": (0, 2, 7, 2, 0), " ": (0, 0, 0, 0, 0),
}  # fmt: skip
_UNKNOWN = (7, 7, 7, 7, 7)


class Raster:
    """Pixels, white at first."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: int) -> None:
        """Draw a polyline."""
        ink = _rgb(colour)
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
            for step in range(steps + 1):
                at = step / steps
                self._dot(round(x0 + (x1 - x0) * at), round(y0 + (y1 - y0) * at), width, ink)

    def text(self, x: float, y: float, text: str, colour: str, *, anchor: str) -> None:
        """Write in capitals with the baseline at y."""
        length = len(text) * _ADVANCE - _SCALE
        left = round(x) - {"start": 0, "middle": length // 2, "end": length}[anchor]
        top = round(y) - 5 * _SCALE
        ink = _rgb(colour)
        for index, letter in enumerate(text.upper()):
            for row, bits in enumerate(_GLYPHS.get(letter, _UNKNOWN)):
                for column in range(3):
                    if bits & (4 >> column):
                        self._dot(left + index * _ADVANCE + column * _SCALE, top + row * _SCALE, _SCALE, ink)

    def png(self) -> bytes:
        """Return the picture as a PNG file (ISO 15948): 8-bit RGB, no filter."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = b"".join(b"\0" + row for row in self._rows)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)

    def _dot(self, x: int, y: int, size: int, ink: bytes) -> None:
        for row in range(max(0, y), min(self.height, y + size)):
            first, last = max(0, x), min(self.width, x + size)
            if first < last:
                self._rows[row][3 * first : 3 * last] = ink * (last - first)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour.removeprefix("#"))
