"""Response bodies, in OpenAI's shapes plus a `pdgate` object."""

from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec

from contracts.rating import Meter, rate
from contracts.usage import UsageEvent
from gateway.schemas.choices import Choice


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the prompt tokens."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the completion tokens."""

    reasoning_tokens: int
    audio_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request, from the engine."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Telling(msgspec.Struct, frozen=True):
    """What an answer may say of how it was served."""

    currency: str
    sees_workers: bool = False


class ServedBy(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of the workers, one and the same where there was no pair."""

    prefill: str
    decode: str


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was served and what it cost."""

    rid: str
    path: str | None
    hand_off: str | None
    attempts: int
    cached_tokens: int
    cost: str  # decimal text, currency units
    cost_nano: int
    currency: str
    simulated: bool  # a timed engine made the text
    workers: ServedBy | msgspec.UnsetType = msgspec.UNSET  # for keys that may know them


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat completion."""

    id: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage
    pdgate: Served
    object: str = "chat.completion"


class MeterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One metered record of a request."""

    meter: str
    tokens: int
    price: str  # currency units per million tokens, decimal text
    cost: str  # currency units, decimal text
    cost_nano: int
    worker: str = ""  # the one that did this phase


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """What the request saw, in ms."""

    ttft_ms: float
    tpot_ms: float
    total_ms: float
    queue_ms: float
    prefill_ms: float
    transfer_ms: float


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/requests/{id}`: one request as it stands."""

    id: str
    model: str
    status: str  # running, or how it ended
    created: int
    organisation: str
    project: str
    key_id: str
    pool: str
    tier: str
    stream: bool
    finish_reason: str = ""
    cause: str = ""
    path: str | None = None
    hand_off: str | None = None
    attempts: int = 1
    prefill_worker: str = ""
    decode_worker: str = ""
    usage: Usage | None = None
    meters: Sequence[MeterRow] = ()
    cost: str = "0"
    cost_nano: int = 0
    currency: str
    price_version: int | None = None
    estimated: bool = False
    simulated: bool = False
    slo_met: bool | None = None
    settled_by: str | None = None
    timings: RequestTimings | None = None
    user: str = ""
    tags: Mapping[str, str] = {}
    reference: str = ""  # the client's own x-request-id
    object: str = "pdgate.request"


class ModelPrice(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of a model: currency units per million tokens, decimal text."""

    prefill_computed: str
    prefill_cached: str
    decode: str
    currency: str
    version: int


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """SLO targets of one tier, ms."""

    ttft_ms: float | None
    tpot_ms: float | None


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model of `GET /v1/models`."""

    id: str
    created: int
    owned_by: str
    context_length: int
    max_output_tokens: int
    aliases: Sequence[str]
    ready: bool
    simulated: bool
    price: ModelPrice | None
    tiers: Mapping[str, TierView]
    hand_off: str
    route: Sequence[str] = ()
    """Of a route: its primary and its local model. Prices and targets are the primary's."""
    targets: Sequence[str] = ()
    """Of a name that operators gave: the models that serve it. Prices and targets are the first one's."""
    deprecated_at: int | None = None  # Unix seconds
    sunset_at: int | None = None  # refused from then on
    replacement: str | None = None
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    data: Sequence[ModelView]
    object: str = "list"


def money_text(nano: int) -> str:
    """Return nano-units as decimal text in currency units, without trailing zeros."""
    text = f"{Decimal(nano) / 1_000_000_000:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def usage_of(event: UsageEvent) -> Usage:
    """Return the usage object of a settled request."""
    tokens = event.tokens
    return Usage(
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.decode,
        total_tokens=tokens.prompt + tokens.decode,
        prompt_tokens_details=PromptDetails(cached_tokens=tokens.prefill_cached),
        completion_tokens_details=CompletionDetails(reasoning_tokens=event.reasoning_tokens),
    )


def served_of(event: UsageEvent, telling: Telling) -> Served:
    """Return the `pdgate` object of a settled request."""
    workers = ServedBy(prefill=event.prefill_worker or event.decode_worker, decode=event.decode_worker)
    return Served(
        rid=event.rid,
        path=event.path,
        hand_off=event.hand_off,
        attempts=event.attempts,
        cached_tokens=event.tokens.prefill_cached,
        cost=money_text(event.cost),
        cost_nano=event.cost,
        currency=telling.currency,
        simulated=event.simulated,
        workers=workers if telling.sees_workers else msgspec.UNSET,
    )


def meters_of(event: UsageEvent) -> list[MeterRow]:
    """Return the three rows of a settled request; what is not billable costs 0."""
    rows = []
    for meter in Meter:
        price = event.price.of(meter, batch=event.batch, scope=event.cache_scope)
        cost = rate(event.tokens.of(meter), price) if event.billable else 0
        rows.append(
            MeterRow(
                meter=meter,
                tokens=event.tokens.of(meter),
                price=money_text(price),
                cost=money_text(cost),
                cost_nano=cost,
                worker=event.decode_worker if meter is Meter.DECODE else event.prefill_worker or event.decode_worker,
            )
        )
    return rows
