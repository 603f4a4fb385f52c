"""The course of a pool for people without Prometheus: a point each 5 s, kept for a day, in a Redis stream.

The scheduler's leader writes, the portal and `pdgate top` read. A pool without a leader has a gap.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from contracts import keys

PERIOD_S = 5.0
NUM_POINTS = 17_280
_FIELD = "d"


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that changed its role, or was told to."""

    worker_id: str
    from_role: str
    to_role: str
    why: str
    done: bool
    """False = begun, cancelled, or only thought of under `shadow`."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One pool over one period."""

    at_unix_ms: int
    prefill: int
    """Ready workers by role."""
    decode: int
    unified: int
    target: str
    """Where the controller wants to go, as `4P3D1U`."""
    why: str
    """Of the controller's last tick."""
    mode: str
    rung: str
    """Of the degrade ladder."""
    met: int
    missed: int
    structural: int
    refused: int
    by_stage: Mapping[str, int]
    """Misses by the stage they are blamed on."""
    num_waiting: int
    oldest_wait_s: float
    queued_prefill_tokens: int
    decode_use: float
    """KV tokens in use over capacity, 0 to 1."""
    num_running: int
    rate_rps: float | None = None
    goodput_rps: float | None = None
    """Predicted."""
    pairs: Mapping[str, int] = {}
    """Pairs of a prefill and a decode worker by how far they are trusted, or by what keeps them apart."""
    idle_step_ms: float | None = None
    """A decode step of one request on an idle worker, as far as that is known: no TPOT target below it can be met."""
    idle_first_ms: float | None = None
    """Likewise the least time to a first token: a prompt of one token, its hand-off, one step."""
    flips: tuple[Flip, ...] = ()
    desired: str = ""
    """Workers that the autoscaler asks for, as `4P3D1U`; empty = nobody scales the pool."""
    scale_why: str = ""
    """Of its last decision."""

    @property
    def attainment(self) -> float | None:
        """Share (0 to 1) of requests that met their targets; None without any."""
        total = self.met + self.missed
        return self.met / total if total else None

    @property
    def attainment_with_refused(self) -> float | None:
        """The same with refused requests counted as missed."""
        total = self.met + self.missed + self.refused
        return self.met / total if total else None


def summed_up(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most `most` points for the same time, each of some that follow each other.

    What was counted is added, what waits or is used is the highest of them, rates are means; the rest, and the time,
    are the last one's. So a miss of five seconds is in the course of a day, and so is a short queue.
    """
    size = -(-len(points) // most) or 1
    return [_one_of(points[i : i + size]) for i in range(0, len(points), size)]


def _one_of(points: Sequence[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    by_stage: Counter[str] = Counter()
    for one in points:
        by_stage.update(one.by_stage)
    return msgspec.structs.replace(
        points[-1],
        met=sum(one.met for one in points),
        missed=sum(one.missed for one in points),
        structural=sum(one.structural for one in points),
        refused=sum(one.refused for one in points),
        by_stage=dict(by_stage),
        num_waiting=max(one.num_waiting for one in points),
        oldest_wait_s=max(one.oldest_wait_s for one in points),
        queued_prefill_tokens=max(one.queued_prefill_tokens for one in points),
        decode_use=max(one.decode_use for one in points),
        num_running=max(one.num_running for one in points),
        rate_rps=_mean(one.rate_rps for one in points),
        goodput_rps=_mean(one.goodput_rps for one in points),
        flips=tuple(flip for one in points for flip in one.flips),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


_decode = msgspec.msgpack.Decoder(Point).decode


def add_command(pool: str, point: Point) -> tuple[Any, ...]:
    """Return the Redis command that appends a point and drops what is older than a day."""
    return ("XADD", keys.series(pool), "MAXLEN", "~", NUM_POINTS, "*", _FIELD, msgspec.msgpack.encode(point))


async def read_series(redis: Redis, pool: str, *, since_unix_ms: int = 0, count: int = NUM_POINTS) -> Sequence[Point]:
    """Return the latest `count` points since a time, the oldest first. Points of another version are left out.

    Raises:
        redis.exceptions.RedisError: Redis is away.
    """
    rows: Any = await redis.xrevrange(keys.series(pool), "+", str(since_unix_ms), count=count)
    points = []
    for _, fields in reversed(rows):
        try:
            points.append(_decode(fields[_FIELD.encode()]))
        except (KeyError, msgspec.MsgspecError):
            continue
    return points
