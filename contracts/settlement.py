"""The two money scripts as typed calls. Reserve before work, settle once after, whoever settles.

The gateway settles what it served; the scheduler settles for a dead gateway; billing sweeps what
nobody settled. All three run the same settle.lua, so a request is settled once.
"""

import enum
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from redis.asyncio import Redis

from contracts import keys, rating
from contracts.identity import shard_of
from contracts.rating import CacheScope, Tokens
from contracts.resp import Argument, RespConnection, Script
from contracts.units import MAX_EXACT_NANO, Nano
from contracts.usage import REPEATED, UNPAID, Outcome, UsageEvent
from contracts.wire import VERSION, Owner, RequestOutcome

KEEP_SETTLED_MS = 600_000
KEEP_UNRESERVED_MS = 86_400_000  # a journal may be read again after so long

METER_REQUESTS = "requests"
METER_PROMPT = "prompt_tokens"
METER_UNCACHED = "uncached_prompt_tokens"
METER_GENERATED = "generated_tokens"
METER_TOKENS = "tokens"  # prompt + generated


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One token bucket and what this request takes from it."""

    key: str
    meter: str
    limit: int  # per minute
    amount: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One concurrency limit."""

    key: str
    limit: int


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One money limit, nano-units. A limit that billing wrote into the hash replaces `limit`."""

    key: str
    limit: int | None
    amount: int
    required: bool = False  # the hash must have a limit: without one Redis has lost it


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything reserved for one request; stored as it is, read back by settle.lua and by sweepers."""

    v: int = VERSION
    rid: str
    member: str  # `org/rid`
    now_ms: int
    deadline_ms: int
    key_id: str
    key_state: str
    owner: str  # encode_owner: JSON, since Redis' msgpack has no binary type
    pool: str
    gateway_id: str = ""  # whose request it is until a scheduler has it in flight
    rates: Sequence[Rate] = ()
    leases: Sequence[Lease] = ()
    budgets: Sequence[Budget] = ()


class Reserved(msgspec.Struct, frozen=True):
    """Granted. `remaining` and `reset_ms` follow the order of Reservation.rates."""

    remaining: tuple[int, ...]
    reset_ms: tuple[int, ...]


class LimitHit(msgspec.Struct, frozen=True):
    """Refused by one limit; nothing was taken from any. `remaining` and `reset_ms` are as they stand."""

    kind: str  # rate | lease | budget
    index: int  # into Reservation.rates, .leases or .budgets
    retry_after_ms: int | None  # None: waiting does not help
    available: int
    remaining: tuple[int, ...] = ()
    reset_ms: tuple[int, ...] = ()


class KeyStateDiffers(msgspec.Struct, frozen=True):
    """The shard knows another state of the key (None = none): load it from Postgres and repeat."""

    current: str | None


class Duplicate(msgspec.Struct, frozen=True):
    """This rid is reserved already."""


class BudgetUnknown(msgspec.Struct, frozen=True):
    """Redis has lost a budget, and billing has not yet written it again. `index` is into Reservation.budgets."""

    index: int


class Unreserved(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a request that was let in while Redis did not answer: charged when it is settled."""

    rates: Sequence[Rate] = ()
    budgets: Sequence[Budget] = ()


class NotExtended(msgspec.Struct, frozen=True):
    """A budget does not have that much. `available` in nano-units."""

    available: int


class Settled(enum.IntEnum):
    """What became of a settlement. True when this call settled."""

    BEFORE = 0  # by whoever came first
    NOW = 1
    UNRESERVED = 2  # now, although Redis had lost the reservation


ReserveAnswer = Reserved | LimitHit | KeyStateDiffers | Duplicate | BudgetUnknown


class SettlementScripts:
    """Both scripts, registered with one Redis client: redis-py's, or the leaner one for what happens per request."""

    def __init__(self, redis: Redis | RespConnection) -> None:
        folder = files("contracts")
        self._reserve: Any = redis.register_script((folder / "reserve.lua").read_text())
        self._extend: Any = redis.register_script((folder / "extend.lua").read_text())
        self._cached: Any = redis.register_script((folder / "cached.lua").read_text())
        self._settle: Any = redis.register_script((folder / "settle.lua").read_text())

    async def reserve(self, org: str, reservation: Reservation) -> ReserveAnswer:
        """Reserve all limits or none. Raises redis.exceptions.RedisError when Redis is away."""
        for budget in reservation.budgets:
            if not 0 <= budget.amount <= MAX_EXACT_NANO:
                raise ValueError(f"cannot reserve {budget.amount} nano-units exactly")
        answer: Any = await self._reserve(
            keys=[
                keys.reservation(org, reservation.rid),
                keys.open_reservations(org),
                keys.key_states(org),
            ],
            args=[msgspec.msgpack.encode(reservation)],
        )
        match answer[0]:
            case 1:
                flat = answer[2]
                return Reserved(tuple(flat[0::2]), tuple(flat[1::2]))
            case 0:
                wait = int(answer[3])
                flat = answer[5]
                return LimitHit(
                    _text(answer[1]),
                    int(answer[2]),
                    wait if wait >= 0 else None,
                    int(answer[4]),
                    tuple(flat[0::2]),
                    tuple(flat[1::2]),
                )
            case -1:
                return KeyStateDiffers(_text(answer[2]) or None)
            case -3:
                return BudgetUnknown(int(answer[2]))
            case _:
                return Duplicate()

    async def extend(self, org: str, rid: str, nano: int) -> NotExtended | None:
        """Reserve `nano` more of every budget of a request that runs; None = granted, or settled already.

        Raises RedisError.
        """
        if not 0 < nano <= MAX_EXACT_NANO:
            raise ValueError(f"cannot reserve {nano} nano-units exactly")
        answer: Any = await self._extend(
            keys=[keys.reservation(org, rid), keys.reservation_added(org, rid)], args=[nano]
        )
        return NotExtended(int(answer[2])) if answer[0] == 0 else None

    async def found_cached(self, org: str, rid: str, tokens: int) -> bool:
        """Give back uncached prompt tokens of a request that runs: so many were found cached.

        False: settled, or given back before. Raises RedisError.
        """
        answer: Any = await self._cached(
            keys=[keys.reservation(org, rid), keys.reservation_cached(org, rid)], args=[tokens, int(time.time() * 1000)]
        )
        return bool(answer == 1)

    async def settle(
        self, event: UsageEvent, actual: Mapping[str, int], *, unreserved: Unreserved | None = None
    ) -> Settled:
        """Settle `event.rid`, unless it was settled before.

        That is known for ten minutes; whoever settles later writes an event that billing knows already. Of a request
        that was refused nothing is written unless it is reserved: whether it ever was is not known to who settles it.

        `actual`: what to leave charged on each rate meter; a meter that is absent stays as reserved.
        `unreserved`: what to charge where there may be no reservation.
        """
        names, args = settle_call(event, actual, unreserved=unreserved)
        answer: Any = await self._settle(keys=names, args=args)
        return Settled(answer)


def settle_script(connection: RespConnection) -> Script:
    """Return settle.lua, for who settles many at once (Script.call_all). It returns a Settled."""
    return connection.register_script((files("contracts") / "settle.lua").read_text())


def settle_call(
    event: UsageEvent, actual: Mapping[str, int], *, unreserved: Unreserved | None = None
) -> tuple[list[str], list[Argument]]:
    """Return keys and arguments with which settle.lua settles `event.rid`; see SettlementScripts.settle.

    Raises:
        ValueError: the cost is none that Redis can add exactly.
    """
    if not 0 <= event.cost <= MAX_EXACT_NANO:
        raise ValueError(f"cannot charge {event.cost} nano-units exactly")
    request: dict[str, Any] = {
        "now_ms": int(time.time() * 1000),
        "cost": event.cost,
        "actual": dict(actual),
        "ran": event.outcome is not Outcome.REFUSED,
        "scopes": [
            keys.budget(event.org, scope, scope_id)
            for scope, scope_id in (
                ("org", event.org),
                ("project", event.project),
                ("key", event.key_id),
                ("credit", event.org),
            )
        ],
    }
    if unreserved is not None:
        request["unreserved"] = unreserved
    names = [
        keys.reservation(event.org, event.rid),
        keys.open_reservations(event.org),
        keys.usage_stream(shard_of(event.org)),
        keys.settled_request(event.org, event.rid),
        keys.reservation_added(event.org, event.rid),
        keys.reservation_cached(event.org, event.rid),
    ]
    return names, [
        msgspec.msgpack.encode(request),
        msgspec.msgpack.encode(event),
        KEEP_SETTLED_MS if unreserved is None else KEEP_UNRESERVED_MS,
    ]


def usage_event_of(
    owner: Owner, *, rid: str, pool: str, outcome: Outcome, tokens: Tokens | None = None, **told: Any
) -> UsageEvent:
    """Return the event of a request that ended, with what it costs: nothing unless it is billable.

    `told` are the other fields of UsageEvent, as far as whoever settles knows them.
    """
    tokens = tokens or Tokens()
    told = {"batch": owner.batch} | told
    scope = CacheScope.SHARED if owner.share_group else CacheScope.OWN
    if owner.repeated and outcome.billable:
        told["cause"] = REPEATED
    billable = outcome.billable and told.get("cause") not in UNPAID
    return UsageEvent(
        rid=rid,
        org=owner.org,
        project=owner.project,
        key_id=owner.key_id,
        model=owner.model,
        pool=pool,
        tier=owner.tier,
        outcome=outcome,
        tokens=tokens,
        price=owner.price,
        cost=rating.cost(tokens, owner.price, batch=told["batch"], scope=scope) if billable else Nano(0),
        cache_scope=scope,
        simulated=owner.simulated,
        dimensions=owner.dimensions,
        traceparent=owner.traceparent,
        trace_parent_id=owner.trace_parent_id,
        **told,
    )


def actual_usage(event: UsageEvent) -> dict[str, int]:
    """Return what `event` leaves charged on each rate meter: its counts, or nothing if it never ran."""
    tokens = event.tokens
    return {
        METER_PROMPT: tokens.prompt,
        METER_UNCACHED: tokens.prefill_computed,
        METER_GENERATED: tokens.decode,
        METER_TOKENS: tokens.prompt + tokens.decode,
    }


def outcome_of(event: UsageEvent) -> RequestOutcome:
    """Return what the scheduler learns of a settled request."""
    return RequestOutcome(
        rid=event.rid,
        model=event.model,
        tier=event.tier,
        outcome=event.outcome,
        timings=event.timings,
        slo_met=event.slo_met,
        prompt_tokens=event.tokens.prompt,
        cached_tokens=event.tokens.prefill_cached,
        completion_tokens=event.tokens.decode,
        path=event.path,
    )


def encode_owner(owner: Owner) -> str:
    """Return the form of an owner that a reservation stores."""
    return msgspec.json.encode(owner).decode()


def decode_owner(raw: str) -> Owner:
    """Return the owner stored in a reservation."""
    return msgspec.json.decode(raw, type=Owner)


def decode_reservation(raw: bytes) -> Reservation:
    """Return a stored reservation, for sweepers."""
    return msgspec.msgpack.decode(raw, type=Reservation)


def _text(raw: Any) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)
