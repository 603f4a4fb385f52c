"""Names of requests, attempts and shards: how they are made and what can be read from them."""

import binascii
import re
import secrets
from functools import lru_cache
from typing import Final

NUM_SHARDS: Final = 64
_ROOM_BITS: Final = 63
_RID: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def new_rid(unix_ms: int) -> str:
    """Return a request id: UUIDv7 in its 36-character form.

    Its 48-bit timestamp is the request's `at`, which decides partition, price version and invoice
    period whoever settles the request. Layout: RFC 9562, section 5.7.
    """
    drawn = secrets.randbits(74)
    value = (unix_ms & (2**48 - 1)) << 80
    value |= 0x7 << 76
    value |= (drawn >> 62) << 64
    value |= 0b10 << 62
    value |= drawn & (2**62 - 1)
    h = f"{value:032x}"
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def at_ms(rid: str) -> int:
    """Return the Unix milliseconds inside a request id.

    Raises:
        ValueError: `rid` is not a UUIDv7.
    """
    parts = _RID.fullmatch(rid)
    if parts is None:
        raise ValueError(f"{rid!r} is no UUIDv7")
    return int(parts[1] + parts[2], 16)


def rid_bytes(rid: str) -> bytes:
    """Return the 16 bytes that stand for `rid` in protobuf messages."""
    return bytes.fromhex(rid.replace("-", ""))


def rid_from_bytes(raw: bytes) -> str:
    """Return the 36-character form of 16 bytes."""
    h = raw.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def engine_id(rid: str, attempt: int, sample: int) -> str:
    """Return the engine's id of one sample of one attempt: always 43 characters.

    Fixed length because SGLang aborts by prefix: "r1" would also end "r10".
    """
    if not (1 <= attempt <= 99 and 0 <= sample <= 999):
        raise ValueError(f"attempt {attempt} or sample {sample} is outside 1-99, 0-999")
    return f"{rid}-{attempt:02d}-{sample:03d}"


def new_room() -> int:
    """Return a bootstrap room: the 63-bit key that pairs one prefill with one decode."""
    return secrets.randbits(_ROOM_BITS)


@lru_cache(maxsize=4096)
def shard_of(org: str) -> int:
    """Return the organisation's shard, 0 to 63: CRC-16/XMODEM (the one Redis Cluster uses) mod 64."""
    return binascii.crc_hqx(org.encode(), 0) % NUM_SHARDS
