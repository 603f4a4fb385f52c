"""Whether a prefill and a decode worker may be paired, and if not, why. Pure.

A wrong pair does not fail, it hangs or decodes garbage: with another page size the receiver reads past what was sent,
with another split over devices it waits for ranks that do not exist. So all that shapes the KV cache must be equal.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from contracts.lifecycle import HandOff, Role
from scheduler.policy.cluster import Compatibility, WorkerView


class Unpaired(enum.StrEnum):
    """What keeps two workers apart. A metric label and a column of `pdgate workers`."""

    ROLE = "role"  # the engines' roles in force are not prefill and decode
    MODEL = "model"
    REVISION = "revision"
    DTYPE = "dtype"
    KV_DTYPE = "kv_dtype"
    PAGE_SIZE = "page_size"
    TP = "tp"
    DP = "dp"
    BACKEND = "backend"
    ENGINE = "engine"
    HASH_FORMAT = "hash_format"
    HAND_OFF = "hand_off"  # no hand-off that both can
    NO_ADDRESS = "no_address"  # the prefill side tells no place to fetch from
    UNPROBED = "unprobed"  # fit, but no KV cache has gone from one to the other yet
    PROBE_FAILED = "probe_failed"


_FIELDS: Final[Mapping[str, Unpaired]] = MappingProxyType(
    {
        "engine": Unpaired.ENGINE,
        "model": Unpaired.MODEL,
        "model_revision": Unpaired.REVISION,
        "dtype": Unpaired.DTYPE,
        "kv_dtype": Unpaired.KV_DTYPE,
        "page_size": Unpaired.PAGE_SIZE,
        "tp_size": Unpaired.TP,
        "dp_size": Unpaired.DP,
        "transfer_backend": Unpaired.BACKEND,
        "hash_format": Unpaired.HASH_FORMAT,
    }
)


def mismatch(one: Compatibility, other: Compatibility) -> Unpaired | None:
    """Return the first thing in which two workers differ, None when a KV cache of one fits the other."""
    if one == other:
        return None
    return next(why for field, why in _FIELDS.items() if getattr(one, field) != getattr(other, field))


def unpaired(prefill: WorkerView, decode: WorkerView) -> Unpaired | None:
    """Return why these two must not be a pair, None when they may, as far as registrations tell."""
    if prefill.role is not Role.PREFILL or decode.role is not Role.DECODE:
        return Unpaired.ROLE
    why = mismatch(prefill.pairs_with, decode.pairs_with)
    if why is not None:
        return why
    shared = prefill.hand_offs & decode.hand_offs
    if not shared:
        return Unpaired.HAND_OFF
    if shared == {HandOff.DIRECT} and not prefill.reachable:
        return Unpaired.NO_ADDRESS
    return None
