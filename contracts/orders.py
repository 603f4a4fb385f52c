"""Orders of an operator to the leader of a pool: one worker's role, or its drain. One Redis stream per pool.

The command line writes an order and waits on its answer; the leader that reads it carries it out. An order that is
older than `MAX_AGE_S` when it is read has nobody waiting any more, and is dropped.
"""

from typing import Final, Literal

import msgspec

from contracts.lifecycle import Role

MAX_AGE_S: Final = 10.0
ANSWER_KEPT_MS: Final = 300_000
MAX_ORDERS: Final = 1_000  # kept in the stream


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is to do."""

    v: int = 1
    order_id: str
    worker_id: str
    what: Literal["role", "drain", "undrain"]
    role: Role | None = None  # of "role"
    asked_unix_ms: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How it went."""

    v: int = 1
    ok: bool
    message: str = ""
    role: Role | None = None
    drain_ms: float = 0.0
    switch_ms: float = 0.0


def orders(pool: str) -> str:
    """Return the stream of a pool's orders."""
    return f"pdgate:{{m:{pool}}}:orders"


def answer(pool: str, order_id: str) -> str:
    """Return the list that gets the one answer to an order."""
    return f"pdgate:{{m:{pool}}}:order:{order_id}"
