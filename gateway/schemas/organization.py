"""Answers of `/v1/organization/...`, in OpenAI's shapes; what is ours is in `pdgate`."""

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import msgspec

R = TypeVar("R")


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What is ours of a usage result: the meters apart, and their cost."""

    prefill_computed: int
    prefill_cached: int
    decode: int
    cost: str  # decimal text, currency units
    cost_nano: int
    currency: str


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one group in one bucket; what is not grouped by is null."""

    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    num_model_requests: int
    pdgate: Spent
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None
    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Money for people who read OpenAI's shape: `value` is rounded to a double, `nano` is exact."""

    value: float
    currency: str
    nano: int


class CostResult(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one group in one bucket. `quantity`: the tokens of a line item, where it counts some."""

    amount: Amount
    quantity: int | None = None
    quantity_unit: Literal["tokens"] | None = None
    line_item: str | None = None
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    object: Literal["organization.costs.result"] = "organization.costs.result"


class Bucket(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """One span of time, Unix seconds, end exclusive."""

    start_time: int
    end_time: int
    results: Sequence[R]
    object: Literal["bucket"] = "bucket"


class Page(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """Buckets in order. `next_page` goes into `page` of the next request."""

    data: Sequence[Bucket[R]]
    has_more: bool
    next_page: str | None
    object: Literal["page"] = "page"
