"""What one request takes from each limit, and what the client is told about it. Pure.

Limits exist per key, project and organisation; a request must pass all of them at once, which the
reserve script checks in one step. Tokens and money are reserved for the most the request may use and
corrected when it is settled.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from contracts import keys
from contracts.errors import InsufficientQuota, RateLimited, ServingError
from contracts.rating import Price, rate
from contracts.settlement import (
    METER_GENERATED,
    METER_PROMPT,
    METER_REQUESTS,
    METER_TOKENS,
    METER_UNCACHED,
    Budget,
    Lease,
    LimitHit,
    Rate,
    Reserved,
)
from contracts.units import NanoPerMillion

MIN_USEFUL_TOKENS: Final = 16
"""Limits and budgets that leave less than this for the answer refuse the request."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one scope; None = none of that kind."""

    requests_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None
    uncached_prompt_tokens_per_minute: int | None = None
    generated_tokens_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt + generated
    concurrent_requests: int | None = None
    budget_nano: int | None = None  # money of the running budget period


NO_LIMITS: Final = Limits()

_PER_MINUTE: Final = (
    (METER_REQUESTS, "requests_per_minute"),
    (METER_PROMPT, "prompt_tokens_per_minute"),
    (METER_UNCACHED, "uncached_prompt_tokens_per_minute"),
    (METER_GENERATED, "generated_tokens_per_minute"),
    (METER_TOKENS, "tokens_per_minute"),
)
_WORDS: Final = {
    METER_REQUESTS: "requests",
    METER_PROMPT: "prompt tokens",
    METER_UNCACHED: "uncached prompt tokens",
    METER_GENERATED: "generated tokens",
    METER_TOKENS: "tokens",
}


class TooLargeForLimit(RateLimited):
    """One request alone needs more than the limit allows in a minute: waiting does not help."""

    should_retry = False


class Scope(msgspec.Struct, frozen=True):
    """One holder of limits. `kind` is key, project, org or credit (the organisation's prepaid money)."""

    kind: str
    id: str
    limits: Limits
    budgeted: bool = False  # billing keeps a budget of it, whose limit is in Redis


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may use at most."""

    prompt_tokens: int
    max_tokens: int  # per sample
    paid_tokens: int  # per sample: what money is reserved for
    num_samples: int
    price: Price

    @property
    def generated_tokens(self) -> int:
        """Return the tokens that all samples may generate."""
        return self.max_tokens * self.num_samples

    @property
    def cost_nano(self) -> int:
        """Return the most that the request costs if every sample runs as long as is paid for."""
        answer_nano = rate(self.paid_tokens * self.num_samples, self.price.decode)
        return max(self.prompt_nano + answer_nano, self.price.minimum)

    @property
    def prompt_nano(self) -> int:
        """Return the most that the prompt costs, whatever of it is cached."""
        price = self.price
        dearest = max(price.prefill_computed, price.prefill_cached, price.prefill_shared or 0)
        return rate(self.prompt_tokens, NanoPerMillion(dearest))

    def of(self, meter: str) -> int:
        """Return what the request takes from a rate meter."""
        match meter:
            case "requests":
                return 1
            case "generated_tokens":
                return self.generated_tokens
            case "tokens":
                return self.prompt_tokens + self.generated_tokens
            case _:
                return self.prompt_tokens


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the reserve script, and whose each limit is."""

    rates: Sequence[Rate]
    leases: Sequence[Lease]
    budgets: Sequence[Budget]
    rate_scopes: Sequence[str]
    lease_scopes: Sequence[str]
    budget_scopes: Sequence[str]


def claim(org: str, scopes: Sequence[Scope], need: Need) -> Claim:
    """Return what a request must reserve at every scope."""
    rates: list[Rate] = []
    leases: list[Lease] = []
    budgets: list[Budget] = []
    rate_scopes: list[str] = []
    lease_scopes: list[str] = []
    budget_scopes: list[str] = []
    for scope in scopes:
        limits = scope.limits
        if limits == NO_LIMITS and not scope.budgeted:
            continue
        for meter, field in _PER_MINUTE:
            limit = getattr(limits, field)
            if limit is not None:
                key = keys.rate_bucket(org, scope.kind, scope.id, meter)
                rates.append(Rate(key=key, meter=meter, limit=limit, amount=need.of(meter)))
                rate_scopes.append(scope.kind)
        if limits.concurrent_requests is not None:
            key = keys.concurrency_leases(org, scope.kind, scope.id)
            leases.append(Lease(key=key, limit=limits.concurrent_requests))
            lease_scopes.append(scope.kind)
        if limits.budget_nano is not None or scope.budgeted:
            key = keys.budget(org, scope.kind, scope.id)
            budgets.append(Budget(key=key, limit=limits.budget_nano, amount=need.cost_nano, required=scope.budgeted))
            budget_scopes.append(scope.kind)
    return Claim(
        rates=rates,
        leases=leases,
        budgets=budgets,
        rate_scopes=rate_scopes,
        lease_scopes=lease_scopes,
        budget_scopes=budget_scopes,
    )


def affordable_tokens(hit: LimitHit, asked: Claim, need: Need) -> int:
    """Return the max_tokens per sample that the limit which refused would still allow; 0 = no size would pass."""
    left = 0
    if hit.kind == "rate":
        match asked.rates[hit.index].meter:
            case "generated_tokens":
                left = hit.available
            case "tokens":
                left = hit.available - need.prompt_tokens
            case _:
                left = 0
    elif hit.kind == "budget":
        money = hit.available - need.prompt_nano
        left = money * 1_000_000 // need.price.decode if need.price.decode else 0
    return max(0, left // need.num_samples)


def refusal(hit: LimitHit, asked: Claim, need: Need) -> ServingError:
    """Return the error that tells the client which limit refused, when to come back and what is left of all."""
    error = _refusal(hit, asked, need)
    error.headers = headers(hit, asked)
    return error


def hit_limit(hit: LimitHit, asked: Claim) -> tuple[str, str]:
    """Return which limit refused and whose it is: labels of a counter."""
    match hit.kind:
        case "rate":
            return asked.rates[hit.index].meter, asked.rate_scopes[hit.index]
        case "lease":
            return "concurrent_requests", asked.lease_scopes[hit.index]
        case _:
            return "budget", asked.budget_scopes[hit.index]


def _refusal(hit: LimitHit, asked: Claim, need: Need) -> ServingError:
    wait_s = None if hit.retry_after_ms is None else max(0.001, hit.retry_after_ms / 1000)
    match hit.kind:
        case "rate":
            limit = asked.rates[hit.index]
            what = f"{limit.limit} {_WORDS[limit.meter]} per minute of this {_name(asked.rate_scopes[hit.index])}"
            if wait_s is None:
                return TooLargeForLimit(
                    f"Request too large: it needs {need.of(limit.meter)} {_WORDS[limit.meter]}, the limit is {what}."
                    " Ask for less."
                )
            return RateLimited(
                f"Rate limit reached: {what}. {hit.available} left, {limit.amount} needed."
                f" Try again in {wait_s:.3g} s.",
                retry_after_s=wait_s,
            )
        case "lease":
            limit_name = _name(asked.lease_scopes[hit.index])
            return RateLimited(
                f"Too many requests at once: this {limit_name} may run {asked.leases[hit.index].limit} at a time.",
                retry_after_s=wait_s,
            )
        case _:
            whose = asked.budget_scopes[hit.index]
            what = "The prepaid credit" if whose == "credit" else f"The budget of this {_name(whose)}"
            return InsufficientQuota(f"{what} does not cover this request. Ask for fewer tokens or raise it.")


def headers(granted: Reserved | LimitHit, asked: Claim) -> Mapping[str, str]:
    """Return `x-ratelimit-*` for the tightest scope of each meter that is limited."""
    tightest: dict[str, tuple[int, int, int]] = {}
    for limit, remaining, reset_ms in zip(asked.rates, granted.remaining, granted.reset_ms, strict=True):
        known = tightest.get(limit.meter)
        if known is None or remaining < known[1]:
            tightest[limit.meter] = (limit.limit, remaining, reset_ms)
    names = {
        METER_REQUESTS: "requests",
        METER_TOKENS: "tokens",
        METER_PROMPT: "tokens-prompt",
        METER_UNCACHED: "tokens-uncached-prompt",
        METER_GENERATED: "tokens-generated",
    }
    found: dict[str, str] = {}
    for meter, (limit_a_minute, remaining, reset_ms) in tightest.items():
        found[f"x-ratelimit-limit-{names[meter]}"] = str(limit_a_minute)
        found[f"x-ratelimit-remaining-{names[meter]}"] = str(remaining)
        found[f"x-ratelimit-reset-{names[meter]}"] = duration(reset_ms)
    return found


def duration(ms: int) -> str:
    """Return milliseconds in the form of OpenAI's headers: `120ms`, `1.5s`, `6m0s`."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, rest_ms = divmod(ms, 60_000)
    return f"{minutes}m{rest_ms / 1000:g}s"


def _name(kind: str) -> str:
    return {"key": "API key", "project": "project", "org": "organisation"}[kind]
