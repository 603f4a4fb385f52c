"""What the admin API takes and gives. Money is decimal text in units of the currency; moments are ISO 8601."""

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from gateway.limits import Limits
from gateway.names import Target
from gateway.scopes import Scopes

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Limit = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
MoneyText = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$")]
Moment = Annotated[dt.datetime, msgspec.Meta(tz=True)]  # with its zone: without one it is everybody's own
MemberRole = Literal["owner", "admin", "developer", "billing", "viewer"]


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A misspelt field would do nothing."""


class StrictLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits, without misspelt ones and in the range that Redis counts exactly."""

    requests_per_minute: Limit | None = None
    prompt_tokens_per_minute: Limit | None = None
    uncached_prompt_tokens_per_minute: Limit | None = None
    generated_tokens_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    budget_nano: Limit | None = None


class StrictScopes(Scopes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scopes, without misspelt ones."""


# -- taken ---------------------------------------------------------------------------------------------


class NewOrganisation(Strict, frozen=True, kw_only=True):
    """An organisation with one project. `owner_email` gets an invite."""

    name: Name
    limits: StrictLimits | None = None
    owner_email: str = ""


class OrganisationChange(Strict, frozen=True, kw_only=True):
    """What is given replaces what is there."""

    name: Name | None = None
    limits: StrictLimits | None = None
    needs_second_factor: bool | None = None


class NewProject(Strict, frozen=True, kw_only=True):
    """A project."""

    name: Name
    limits: StrictLimits | None = None
    scopes: StrictScopes | None = None


class ProjectChange(Strict, frozen=True, kw_only=True):
    """What is given replaces what is there."""

    name: Name | None = None
    limits: StrictLimits | None = None
    scopes: StrictScopes | None = None


class NewHold(Strict, frozen=True, kw_only=True):
    """How something is held. `drain`: running answers may come to their end."""

    mode: Literal["suspended", "read_only"] = "suspended"
    drain: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""
    project_id: str = ""  # only that project


class RoleChange(Strict, frozen=True, kw_only=True):
    """Another role for a member."""

    role: MemberRole


class NewInvite(Strict, frozen=True, kw_only=True):
    """An invite; the answer has its link."""

    email: str
    role: MemberRole


class NewServiceAccount(Strict, frozen=True, kw_only=True):
    """A member that is no person and owns keys."""

    name: Name
    project_id: str


class NewKey(Strict, frozen=True, kw_only=True):
    """A key. `owner`: a service account; otherwise it is the caller's."""

    name: Name
    project_id: str
    admin: bool = False
    limits: StrictLimits | None = None
    scopes: StrictScopes | None = None
    expires_at: Moment | None = None
    owner: str = ""


class KeyChange(Strict, frozen=True, kw_only=True):
    """What binds a key; what is given replaces what is there."""

    limits: StrictLimits | None = None
    scopes: StrictScopes | None = None


class Rotation(Strict, frozen=True, kw_only=True):
    """How long the old secret works beside the new one, seconds."""

    overlap_s: Annotated[int, msgspec.Meta(ge=0, le=30 * 86_400)] = 0


class NewBudget(Strict, frozen=True, kw_only=True):
    """Money a month. A soft budget only tells."""

    amount: MoneyText
    soft: bool = False
    thresholds: tuple[Annotated[int, msgspec.Meta(ge=1, le=1000)], ...] = ()  # percent; none = 50, 80, 100


class NewCredit(Strict, frozen=True, kw_only=True):
    """Money given to an organisation: paid for, or promotional. `idempotency` names the gift."""

    amount: MoneyText
    kind: Literal["paid", "promotional"] = "promotional"
    idempotency: Name
    note: Annotated[str, msgspec.Meta(max_length=500)] = ""
    expires_at: Moment | None = None


class PriceTerms(Strict, frozen=True, kw_only=True):
    """A price per million tokens. `organisation`: only that one's; `tier`: only that tier's."""

    model: Name
    prefill_computed: MoneyText
    prefill_cached: MoneyText
    decode: MoneyText
    organisation: str = ""
    tier: str = ""
    prefill_shared: MoneyText | None = None  # of hits on a share group's prefixes; none = as `prefill_cached`
    minimum: MoneyText = "0"  # per request
    batch_ppm: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None


class NewPrice(PriceTerms, frozen=True, kw_only=True):
    """A version of a price, and when it is in force."""

    from_at: Moment | None = None
    to_at: Moment | None = None


class ProposedPrice(PriceTerms, frozen=True, kw_only=True):
    """A price to play on the usage of [`used_from`, `used_to`); without both: of the last UTC month that is over."""

    used_from: Moment | None = None
    used_to: Moment | None = None


class ProfileChange(Strict, frozen=True, kw_only=True):
    """An organisation's billing data. Tax and terms are the operator's to set."""

    legal_name: str = ""
    address: str = ""
    country: str = ""
    tax_id: str = ""
    email: str = ""
    time_zone: str = "UTC"
    webhook_url: str = ""
    webhook_secret: str = ""


class MonthToClose(Strict, frozen=True, kw_only=True):
    """A month whose invoices are made: 2026-11."""

    month: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$")]
    issue: bool = False


class SteeringChange(Strict, frozen=True, kw_only=True):
    """Who decides about a pool's ratio; the counts are for `manual`."""

    mode: Literal["auto", "shadow", "manual"]
    prefill: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    decode: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    unified: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0


class NewOrder(Strict, frozen=True, kw_only=True):
    """What one worker is to do. `wait_s`: how long the answer may be waited for."""

    what: Literal["role", "drain", "undrain"]
    role: Literal["prefill", "decode", "unified"] | None = None
    wait_s: Annotated[int, msgspec.Meta(ge=0, le=60)] = 5


class NewName(Strict, frozen=True, kw_only=True):
    """What a name of a model means. Without targets: the model of that name. `unready` targets may serve later."""

    targets: Annotated[tuple[Target, ...], msgspec.Meta(max_length=20)] = ()
    deprecated_at: dt.datetime | None = None
    sunset_at: dt.datetime | None = None
    replacement: Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f<>\"]*$")] = ""
    unready: bool = False


# -- given ---------------------------------------------------------------------------------------------


class OrganisationView(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation."""

    id: str
    name: str
    is_demo: bool
    limits: Limits
    created_at: dt.datetime
    needs_second_factor: bool
    invite_url: str | None = None  # of the owner, once


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A project."""

    id: str
    organisation_id: str
    name: str
    limits: Limits
    scopes: Scopes


class HoldView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is held."""

    kind: str
    id: str
    mode: str
    drain: bool
    reason: str
    actor: str


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """A person in an organisation."""

    id: str
    email: str
    name: str
    role: str
    since: dt.datetime
    signed_in_at: dt.datetime | None
    second_factor: bool


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """A one-time link. `url` is there once, in the answer that makes it."""

    id: str
    kind: str
    email: str
    role: str | None
    state: str
    issued_by: str
    created_at: dt.datetime
    expires_at: dt.datetime
    url: str | None = None


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key. `secret` is there once, in the answer that makes it."""

    id: str
    project_id: str
    name: str
    prefix: str
    state: str
    admin: bool
    owner: str
    limits: Limits
    scopes: Scopes
    created_at: dt.datetime
    expires_at: dt.datetime | None
    secret: str | None = None


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A budget."""

    scope: str
    scope_id: str
    amount: str
    amount_nano: int
    soft: bool
    thresholds: tuple[int, ...]


class PriceChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """What a price would change for an organisation and meter; `requests`: those whose cost changes."""

    organisation_id: str
    meter: str
    requests: int
    old: str
    new: str
    difference: str
    old_nano: int
    new_nano: int
    difference_nano: int


class PricePreviewView(msgspec.Struct, frozen=True, kw_only=True):
    """A price played on past usage. Nothing was written."""

    used_from: dt.datetime
    used_to: dt.datetime
    difference: str
    difference_nano: int
    changes: Sequence[PriceChangeView]
    object: Literal["price_preview"] = "price_preview"


class NameView(msgspec.Struct, frozen=True, kw_only=True):
    """A name of a model."""

    name: str
    targets: Sequence[Mapping[str, Any]]
    deprecated_at: dt.datetime | None
    sunset_at: dt.datetime | None
    replacement: str
    actor: str


class OrderView(msgspec.Struct, frozen=True, kw_only=True):
    """How an order to a worker stands. `role` is the one in force; drain and switch are ms."""

    id: str
    worker_id: str
    state: Literal["pending", "done", "refused"]
    message: str = ""
    role: str | None = None
    drain_ms: float = 0.0
    switch_ms: float = 0.0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for is so."""

    id: str
    object: str
    deleted: bool = False


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    """Something of billing or of the fleet, as its owner describes it."""

    object: str
    value: Mapping[str, Any]
