"""Fresh ids and keys, and the hash under which a key is stored."""

import hashlib
import secrets
from typing import Final

KEY_PREFIX: Final = "pdg_"
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_id(kind: str) -> str:
    """Return a fresh id such as `org_4fzN…`: 120 random bits."""
    return f"{kind}_{_base62(secrets.randbits(120), 21)}"


def new_key() -> str:
    """Return a fresh plaintext key: `pdg_` and 43 characters that hold 256 random bits."""
    return KEY_PREFIX + _base62(secrets.randbits(256), 43)


def hash_key(plaintext: str) -> bytes:
    """Return the SHA-256 under which a key is stored."""
    return hashlib.sha256(plaintext.encode()).digest()


def _base62(value: int, width: int) -> str:
    digits = []
    while value:
        value, digit = divmod(value, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits)).rjust(width, "0")
