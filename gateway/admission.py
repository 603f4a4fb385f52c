"""Reserving limits and money for a request, before anything is queued."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import structlog
from redis.exceptions import RedisError, ResponseError

from contracts.errors import ContextTooLong, DependencyDown, InvalidApiKey, ServingError
from contracts.rating import Price
from contracts.settlement import (
    METER_UNCACHED,
    BudgetUnknown,
    KeyStateDiffers,
    LimitHit,
    Reservation,
    ReserveAnswer,
    Reserved,
    SettlementScripts,
    Unreserved,
    encode_owner,
)
from contracts.wire import Owner
from gateway.lengths import Lengths
from gateway.limits import (
    MIN_USEFUL_TOKENS,
    NO_LIMITS,
    Claim,
    Need,
    Scope,
    affordable_tokens,
    claim,
    headers,
    hit_limit,
    refusal,
)
from gateway.outage import Outage
from gateway.purse import first_payment
from gateway.tenants import ApiKey
from gateway.terms import Admitted
from observability.metrics import Instruments

log = structlog.get_logger()

_MAX_WAITS: Final = 8
_MAX_TRIES: Final = 5 + _MAX_WAITS
_SETTLED_WITHIN_S: Final = 2.0
_DOWN: Final = "The request queue cannot be reached right now."


class ReservationUnknown(DependencyDown):
    """Redis did not answer: the reservation may stand or not."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for, as far as limits care."""

    rid: str
    pool: str
    owner: Owner
    price: Price
    prompt_tokens: int
    asked_tokens: int | None  # None: the client did not say
    default_tokens: int
    context_tokens: int
    num_samples: int
    now_ms: int
    deadline_ms: int
    prompt_field: str = "messages"  # what the prompt is called in the body


class Admission:
    """Runs the reserve script and tells the client why not."""

    def __init__(
        self,
        scripts: SettlementScripts,
        *,
        lengths: Lengths,
        outage: Outage,
        instruments: Instruments,
        caught_up: Callable[[str, float], Awaitable[bool]],
        gateway_id: str,
    ) -> None:
        """`caught_up(org, timeout_s)` waits for settlements under way; false if there were none or not in time."""
        self._scripts = scripts
        self._lengths = lengths
        self._outage = outage
        self._instruments = instruments
        self._caught_up = caught_up
        self._gateway_id = gateway_id

    async def admit(self, asked: Asked, key: ApiKey, reload_key: Callable[[], Awaitable[ApiKey]]) -> Admitted:
        """Reserve everything or nothing.

        The effective maximum is what the client asked for or the model's default, within the context. If
        the client did not say, it shrinks to what limits and budgets leave, down to a useful minimum. Money is
        reserved for the tenant's usual length and extended while the answer runs (gateway.purse).

        While Redis does not answer, a few requests go on unreserved (gateway.outage).

        A client is answered before its request is settled. So that its next one finds free what it knows to
        have ended, a limit counts only once those settlements are through.

        Raises:
            ContextTooLong, InvalidApiKey, RateLimited, InsufficientQuota, DependencyDown.
        """
        max_tokens = most_tokens(asked)
        likely = self._lengths.likely(key.organisation_id, asked.owner.model)
        reloaded, waits = False, 0
        for _ in range(_MAX_TRIES):
            need = Need(
                prompt_tokens=asked.prompt_tokens,
                max_tokens=max_tokens,
                paid_tokens=first_payment(max_tokens=max_tokens, likely_tokens=likely),
                num_samples=asked.num_samples,
                price=asked.price,
            )
            wanted = claim(key.organisation_id, scopes_of(key), need)
            answer = await self._reserve(asked, key, wanted)
            match answer:
                case None:
                    return _let_in(need, wanted)
                case Reserved():
                    paid_tokens = need.paid_tokens if wanted.budgets else max_tokens
                    return Admitted(
                        max_tokens=max_tokens,
                        paid_tokens=paid_tokens,
                        headers=headers(answer, wanted),
                        limits_uncached=any(rate.meter == METER_UNCACHED for rate in wanted.rates),
                    )
                case KeyStateDiffers() | BudgetUnknown() if not reloaded:
                    key = await _reloaded(reload_key)
                    reloaded = True
                case LimitHit():
                    # Again and again: others may take first what was waited for, with old claims of their own.
                    if waits < _MAX_WAITS and await self._caught_up(key.organisation_id, _SETTLED_WITHIN_S):
                        waits += 1
                        continue
                    left = affordable_tokens(answer, wanted, need)
                    if asked.asked_tokens is not None or not MIN_USEFUL_TOKENS <= left < max_tokens:
                        raise self._refused(answer, wanted, need)
                    max_tokens = left
                case _:
                    raise _error_of(answer, asked.rid)
        raise redis_down()

    async def _reserve(self, asked: Asked, key: ApiKey, wanted: Claim) -> ReserveAnswer | None:
        """Run the script; None: Redis does not answer, and the request may go on all the same."""
        try:
            reservation = _reservation(asked, key, wanted, gateway_id=self._gateway_id)
            answer = await self._scripts.reserve(key.organisation_id, reservation)
        except RedisError as error:
            log.warning("reserve_failed", rid=asked.rid, error=str(error))
            if isinstance(error, ResponseError) or not self._outage.let_in(key.id):
                raise ReservationUnknown(_DOWN, retry_after_s=1) from None
            return None
        self._outage.over()
        return answer

    def _refused(self, hit: LimitHit, wanted: Claim, need: Need) -> ServingError:
        limit, scope = hit_limit(hit, wanted)
        self._instruments.limiter_refusals.add(1, {"limit": limit, "scope": scope})
        return refusal(hit, wanted, need)


async def _reloaded(reload_key: Callable[[], Awaitable[ApiKey]]) -> ApiKey:
    try:
        return await reload_key()
    except RedisError:
        raise ReservationUnknown(_DOWN, retry_after_s=1) from None


def _error_of(answer: ReserveAnswer, rid: str) -> ServingError:
    match answer:
        case KeyStateDiffers():
            return InvalidApiKey("This API key is being changed. Try again.")
        case BudgetUnknown():
            return DependencyDown("Your budget is being read again. Try again shortly.", retry_after_s=1)
        case _:
            return ServingError(f"request id {rid} was given out twice")


def most_tokens(asked: Asked) -> int:
    """Return the most tokens per sample that context and model allow.

    Raises:
        ContextTooLong: no room for what was asked, or for a useful answer if nothing was.
    """
    room = asked.context_tokens - asked.prompt_tokens
    if room < (1 if asked.asked_tokens is not None else MIN_USEFUL_TOKENS):
        raise ContextTooLong(
            prompt_tokens=asked.prompt_tokens, limit_tokens=asked.context_tokens, param=asked.prompt_field
        )
    return min(asked.asked_tokens or asked.default_tokens, room)


def scopes_of(key: ApiKey) -> Sequence[Scope]:
    """Return the holders of limits above a request, the narrowest first."""
    scopes = (
        Scope("key", key.id, key.limits, "key" in key.budgeted),
        Scope("project", key.project_id, key.project_limits, "project" in key.budgeted),
        Scope("org", key.organisation_id, key.organisation_limits, "org" in key.budgeted),
    )
    if "credit" not in key.budgeted:
        return scopes
    return (*scopes, Scope("credit", key.organisation_id, NO_LIMITS, budgeted=True))


def _reservation(asked: Asked, key: ApiKey, wanted: Claim, *, gateway_id: str) -> Reservation:
    return Reservation(
        rid=asked.rid,
        member=f"{key.organisation_id}/{asked.rid}",
        now_ms=asked.now_ms,
        deadline_ms=asked.deadline_ms,
        key_id=key.id,
        key_state=key.key_state,
        owner=encode_owner(asked.owner),
        pool=asked.pool,
        gateway_id=gateway_id,
        rates=wanted.rates,
        leases=wanted.leases,
        budgets=wanted.budgets,
    )


def _let_in(need: Need, wanted: Claim) -> Admitted:
    unreserved = Unreserved(rates=wanted.rates, budgets=wanted.budgets)
    return Admitted(max_tokens=need.max_tokens, paid_tokens=need.max_tokens, headers={}, unreserved=unreserved)


def redis_down() -> DependencyDown:
    """Return the error for a request that cannot be admitted without Redis."""
    return DependencyDown(_DOWN, retry_after_s=1)
