"""Names of prompt blocks, computed alike by gateways (to place) and workers (to say what they hold). Pure.

A block is `BLOCK_TOKENS` tokens of a prompt, from its start. Its name covers everything before it, so that an
equal name means equal KV cache: `h(i) = blake2b-8(h(i-1) + tokens of block i)`, and `h(-1)` is the scope: model
revision, adapter and tenant salt. Two tenants with different salts share no name, whatever their prompts say. The rest
of a prompt behind its last full block has no name.

A name has 64 bits: among two million blocks one pair collides with a probability of 1e-7, and what a collision costs is
one request placed for a prefix that its worker does not have.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable
from typing import Final

HASH_FORMAT: Final = "blake2b8-64"
"""In each registration: workers that name blocks otherwise are not indexed."""

BLOCK_TOKENS: Final = 64
_BLOCK_BYTES: Final = 4 * BLOCK_TOKENS
_TAG: Final = b"pdgate-prefix-1"


def scope(*, model_revision: str, adapter: str = "", salt: str = "") -> int:
    """Return what the chain of a prompt begins with. Each part is told apart by its length."""
    digest = hashlib.blake2b(_TAG, digest_size=8)
    for part in (model_revision, adapter, salt):
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return int.from_bytes(digest.digest(), "little")


def next_block(parent: int, tokens: bytes) -> int:
    """Return the name of the block that follows `parent`.

    Args:
        parent: the name before it, or the scope.
        tokens: exactly BLOCK_TOKENS ids, packed u32 (contracts.wire.pack_ids).
    """
    digest = hashlib.blake2b(parent.to_bytes(8, "little"), digest_size=8)
    digest.update(tokens)
    return int.from_bytes(digest.digest(), "little")


def prompt_blocks(prompt: bytes, start: int) -> list[int]:
    """Return the names of the full blocks of a packed prompt; `start` is its scope."""
    names = []
    name = start
    for at in range(0, len(prompt) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        name = next_block(name, prompt[at : at + _BLOCK_BYTES])
        names.append(name)
    return names


def pack_blocks(names: Iterable[int]) -> bytes:
    """Return names as little-endian u64, as KvEvents carry them."""
    packed = array("Q", names)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_blocks(raw: bytes) -> list[int]:
    """Return the names of pack_blocks. Raises ValueError when `raw` is no whole number of u64."""
    unpacked = array("Q")
    unpacked.frombytes(raw)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
