"""The bytes of single tokens, as log probabilities name them.

Decoding a token alone loses bytes: a token may be a part of a character. So the bytes are read from the
vocabulary, in the two ways that tokenizers spell them: GPT-2's alphabet of 256 printable characters, or
SentencePiece's `▁` for a space and `<0xE2>` for a byte.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _alphabet() -> dict[str, int]:
    """Return GPT-2's characters: printable bytes stand for themselves, the others follow from U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET: Final = _alphabet()


class TokenBytes:
    """Bytes by token id; what was asked once is kept."""

    def __init__(self, spelling: Callable[[int], str], *, byte_level: bool, added: Mapping[int, str]) -> None:
        """`spelling` gives a token as the vocabulary has it; `added` are the special ones, spelled as they read."""
        self._spelling = spelling
        self._byte_level = byte_level
        self._added = added
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled = self._spelling(token_id) or ""
        if self._byte_level:
            return bytes(_ALPHABET[c] for c in spelled) if all(c in _ALPHABET for c in spelled) else spelled.encode()
        if byte := _BYTE.match(spelled):
            return bytes([int(byte.group(1), 16)])
        return spelled.replace("▁", " ").encode()
