"""Who decides about a pool's ratio, as an operator set it: survives every leader."""

from typing import Literal

import msgspec


class Steering(msgspec.Struct, frozen=True, kw_only=True):
    """Mode of the ratio controller and, under `manual`, the split to keep."""

    mode: Literal["auto", "shadow", "manual"]
    prefill: int = 0
    decode: int = 0
    unified: int = 0


def encode_steering(steering: Steering) -> bytes:
    """Return the form kept in Redis."""
    return msgspec.msgpack.encode(steering)


def decode_steering(raw: bytes) -> Steering:
    """Return what is kept in Redis. Raises msgspec.MsgspecError on garbage."""
    return msgspec.msgpack.decode(raw, type=Steering)
