"""Reserving limits and money for a request, before anything is queued."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog
from redis.exceptions import RedisError

from contracts.errors import ContextTooLong, DependencyDown, InvalidApiKey, ServingError
from contracts.rating import Price
from contracts.settlement import (
    Duplicate,
    KeyStateDiffers,
    LimitHit,
    Reservation,
    Reserved,
    SettlementScripts,
    encode_owner,
)
from contracts.wire import Owner
from gateway.limits import MIN_USEFUL_TOKENS, Need, Scope, affordable_tokens, claim, headers, refusal
from gateway.tenants import ApiKey

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


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its reservation."""

    max_tokens: int  # per sample, enforced in the engine
    headers: Mapping[str, str]


class Admission:
    """Runs the reserve script and tells the client why not."""

    def __init__(
        self,
        scripts: SettlementScripts,
        *,
        caught_up: Callable[[str, float], Awaitable[bool]],
    ) -> None:
        """`caught_up(org, timeout_s)` waits for settlements under way; false if there were none or not in time."""
        self._scripts = scripts
        self._caught_up = caught_up

    async def admit(self, asked: Asked, key: ApiKey, reload_key: Callable[[], Awaitable[ApiKey]]) -> Admitted:
        """Reserve everything or nothing.

        The effective maximum is what the client asked for or the model's default, within the context. If
        the client did not say, it shrinks to what limits and budgets leave, down to a useful minimum.

        A client is answered before its request is settled. So that its next one finds free what it knows to
        have ended, a limit counts only once those settlements are through.

        Raises:
            ContextTooLong, InvalidApiKey, RateLimited, InsufficientQuota, DependencyDown.
        """
        max_tokens = most_tokens(asked)
        reloaded, waits = False, 0
        for _ in range(_MAX_TRIES):
            need = Need(
                prompt_tokens=asked.prompt_tokens,
                max_tokens=max_tokens,
                num_samples=asked.num_samples,
                price=asked.price,
            )
            wanted = claim(key.organisation_id, scopes_of(key), need)
            reservation = Reservation(
                rid=asked.rid,
                member=f"{key.organisation_id}/{asked.rid}",
                now_ms=asked.now_ms,
                deadline_ms=asked.deadline_ms,
                key_id=key.id,
                key_state=key.key_state,
                owner=encode_owner(asked.owner),
                pool=asked.pool,
                rates=wanted.rates,
                leases=wanted.leases,
                budgets=wanted.budgets,
            )
            try:
                answer = await self._scripts.reserve(key.organisation_id, reservation)
                if isinstance(answer, KeyStateDiffers) and not reloaded:
                    key = await reload_key()
                    reloaded = True
                    continue
            except RedisError as error:
                log.warning("reserve_failed", rid=asked.rid, error=str(error))
                raise ReservationUnknown(_DOWN, retry_after_s=1) from None
            match answer:
                case Reserved():
                    return Admitted(max_tokens=max_tokens, headers=headers(answer, wanted))
                case LimitHit():
                    # Again and again: others may take first what was waited for, with old claims of their own.
                    if waits < _MAX_WAITS and await self._caught_up(key.organisation_id, _SETTLED_WITHIN_S):
                        waits += 1
                        continue
                    left = affordable_tokens(answer, wanted, need)
                    if asked.asked_tokens is None and MIN_USEFUL_TOKENS <= left < max_tokens:
                        max_tokens = left
                        continue
                    raise refusal(answer, wanted, need)
                case KeyStateDiffers():
                    raise InvalidApiKey("This API key is being changed. Try again.")
                case Duplicate():
                    raise ServingError(f"request id {asked.rid} was given out twice")
        raise redis_down()


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
    return (
        Scope("key", key.id, key.limits),
        Scope("project", key.project_id, key.project_limits),
        Scope("org", key.organisation_id, key.organisation_limits),
    )


def redis_down() -> DependencyDown:
    """Return the error for a request that cannot be admitted without Redis."""
    return DependencyDown(_DOWN, retry_after_s=1)
