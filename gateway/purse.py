"""Money for requests that run longer than was reserved for: extended before it is used up, or the answer ends.

1. Admission reserves money for the tenant's usual length, not for the maximum (`paid_tokens`).
2. A slot that comes within `MARGIN_TOKENS` of what is paid says so once; the generation asks here.
3. More is reserved by one script. If a budget has no more, the answer ends as at its maximum: what it has used is
   within what was reserved, since the margin covers what workers make until they hear of it.

While Redis is away running streams go on; the money is asked for again when it is back.

The limit of uncached prompt tokens is reserved for the whole prompt. What of it was found cached goes back as soon as
the prefill side tells, not only with the settlement.
"""

import asyncio
from typing import Final, NamedTuple, Protocol

import structlog
from redis.exceptions import RedisError

from contracts.rating import rate
from contracts.settlement import NotExtended, SettlementScripts
from gateway.terms import Admitted, Terms

log = structlog.get_logger()

MARGIN_TOKENS: Final = 32
"""Per sample: what may still come after the decision to stop."""

_MIN_STEP_TOKENS: Final = 256
_MAX_WAITING: Final = 10_000
_RETRY_S: Final = 0.2


class Spender(Protocol):
    """A request that runs. Implemented by gateway.generation."""

    terms: Terms
    granted: Admitted
    paid_tokens: int

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        ...

    def extended(self, paid_tokens: int) -> None:
        """Take notice that so many tokens per sample are paid."""
        ...

    def cut(self) -> None:
        """End the answer: no budget pays for more."""
        ...


class _Found(NamedTuple):
    """Cached prompt tokens of a request that runs."""

    org: str
    rid: str
    tokens: int


def first_payment(*, max_tokens: int, likely_tokens: int | None) -> int:
    """Return the tokens per sample to reserve money for at admission."""
    if likely_tokens is None:
        return max_tokens
    return min(max_tokens, max(likely_tokens, MARGIN_TOKENS) + MARGIN_TOKENS)


def allowance_of(*, paid_tokens: int, max_tokens: int) -> int | None:
    """Return after how many tokens of a sample more money is needed; None = never."""
    return None if paid_tokens >= max_tokens else max(0, paid_tokens - MARGIN_TOKENS)


class Purse:
    """Extends reservations. `run` until cancelled."""

    def __init__(self, scripts: SettlementScripts) -> None:
        self._scripts = scripts
        self._waiting: asyncio.Queue[Spender | _Found] = asyncio.Queue(_MAX_WAITING)

    def ask(self, spender: Spender) -> None:
        """Get more money for a request, or cut it."""
        try:
            self._waiting.put_nowait(spender)
        except asyncio.QueueFull:
            log.warning("extensions_full", rid=spender.terms.rid)
            spender.cut()

    def found_cached(self, org: str, rid: str, tokens: int) -> None:
        """Give back uncached prompt tokens. Nothing is lost if that fails: settlement gives back the same."""
        if not self._waiting.full():
            self._waiting.put_nowait(_Found(org, rid, tokens))

    async def run(self) -> None:
        """Serve requests in the order in which they asked."""
        while True:
            spender = await self._waiting.get()
            if isinstance(spender, _Found):
                await self._give_back(spender)
                continue
            while not spender.over:
                try:
                    await self._extend(spender)
                    break
                except (RedisError, OSError) as error:
                    log.warning("extension_waits", rid=spender.terms.rid, error=str(error))
                    await asyncio.sleep(_RETRY_S)

    async def _give_back(self, found: "_Found") -> None:
        try:
            await self._scripts.found_cached(found.org, found.rid, found.tokens)
        except (RedisError, OSError) as error:
            log.warning("cached_tokens_not_given_back", rid=found.rid, error=str(error))

    async def _extend(self, spender: Spender) -> None:
        terms = spender.terms
        owner, price = terms.owner, terms.owner.price.decode
        step = min(max(spender.paid_tokens, _MIN_STEP_TOKENS), spender.granted.max_tokens - spender.paid_tokens)
        while step > 0:
            nano = rate(step * terms.num_samples, price)
            answer = await self._scripts.extend(owner.org, terms.rid, nano) if nano else None
            if not isinstance(answer, NotExtended):
                spender.extended(spender.paid_tokens + step)
                return
            affordable = max(0, answer.available) * 1_000_000 // price // terms.num_samples
            step = min(step - 1, affordable) if affordable > MARGIN_TOKENS else 0
        log.info("answer_cut", rid=terms.rid, org=owner.org, paid_tokens=spender.paid_tokens)
        spender.cut()
