from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Done(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: _Optional[bool] = ...) -> None: ...

class PriceVersion(_message.Message):
    __slots__ = ("model", "organisation", "tier", "prefill_computed", "prefill_cached", "decode", "prefill_shared", "batch_ppm", "minimum", "from_ms", "to_ms", "by")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SHARED_FIELD_NUMBER: _ClassVar[int]
    BATCH_PPM_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    model: str
    organisation: str
    tier: str
    prefill_computed: int
    prefill_cached: int
    decode: int
    prefill_shared: int
    batch_ppm: int
    minimum: int
    from_ms: int
    to_ms: int
    by: str
    def __init__(self, model: _Optional[str] = ..., organisation: _Optional[str] = ..., tier: _Optional[str] = ..., prefill_computed: _Optional[int] = ..., prefill_cached: _Optional[int] = ..., decode: _Optional[int] = ..., prefill_shared: _Optional[int] = ..., batch_ppm: _Optional[int] = ..., minimum: _Optional[int] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., by: _Optional[str] = ...) -> None: ...

class PriceSet(_message.Message):
    __slots__ = ("version", "from_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    version: int
    from_ms: int
    def __init__(self, version: _Optional[int] = ..., from_ms: _Optional[int] = ...) -> None: ...

class PriceProposal(_message.Message):
    __slots__ = ("price", "from_ms", "to_ms")
    PRICE_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    price: PriceVersion
    from_ms: int
    to_ms: int
    def __init__(self, price: _Optional[_Union[PriceVersion, _Mapping]] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ...) -> None: ...

class PricePreview(_message.Message):
    __slots__ = ("from_ms", "to_ms", "changes")
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    from_ms: int
    to_ms: int
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class Rerating(_message.Message):
    __slots__ = ("id", "model", "price_version", "organisation", "from_ms", "to_ms", "reason", "by")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRICE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    price_version: int
    organisation: str
    from_ms: int
    to_ms: int
    reason: str
    by: str
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., price_version: _Optional[int] = ..., organisation: _Optional[str] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., reason: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("organisation", "meter", "requests", "old_cost", "new_cost")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    METER_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OLD_COST_FIELD_NUMBER: _ClassVar[int]
    NEW_COST_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    meter: str
    requests: int
    old_cost: int
    new_cost: int
    def __init__(self, organisation: _Optional[str] = ..., meter: _Optional[str] = ..., requests: _Optional[int] = ..., old_cost: _Optional[int] = ..., new_cost: _Optional[int] = ...) -> None: ...

class Rerated(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class NewCorrection(_message.Message):
    __slots__ = ("id", "request_id", "prefill_computed", "prefill_cached", "decode", "reason", "by")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    prefill_computed: int
    prefill_cached: int
    decode: int
    reason: str
    by: str
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., prefill_computed: _Optional[int] = ..., prefill_cached: _Optional[int] = ..., decode: _Optional[int] = ..., reason: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("prefill_computed", "prefill_cached", "decode")
    PREFILL_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill_computed: int
    prefill_cached: int
    decode: int
    def __init__(self, prefill_computed: _Optional[int] = ..., prefill_cached: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class Corrected(_message.Message):
    __slots__ = ("changed", "organisation", "old_counts", "new_counts", "old_cost", "new_cost")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    OLD_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NEW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    OLD_COST_FIELD_NUMBER: _ClassVar[int]
    NEW_COST_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    organisation: str
    old_counts: Counts
    new_counts: Counts
    old_cost: int
    new_cost: int
    def __init__(self, changed: _Optional[bool] = ..., organisation: _Optional[str] = ..., old_counts: _Optional[_Union[Counts, _Mapping]] = ..., new_counts: _Optional[_Union[Counts, _Mapping]] = ..., old_cost: _Optional[int] = ..., new_cost: _Optional[int] = ...) -> None: ...

class NewGrant(_message.Message):
    __slots__ = ("organisation", "kind", "amount", "idempotency", "priority", "expires_ms", "note", "by")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    kind: str
    amount: int
    idempotency: str
    priority: int
    expires_ms: int
    note: str
    by: str
    def __init__(self, organisation: _Optional[str] = ..., kind: _Optional[str] = ..., amount: _Optional[int] = ..., idempotency: _Optional[str] = ..., priority: _Optional[int] = ..., expires_ms: _Optional[int] = ..., note: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("id", "repeated_call")
    ID_FIELD_NUMBER: _ClassVar[int]
    REPEATED_CALL_FIELD_NUMBER: _ClassVar[int]
    id: str
    repeated_call: bool
    def __init__(self, id: _Optional[str] = ..., repeated_call: _Optional[bool] = ...) -> None: ...

class BudgetScope(_message.Message):
    __slots__ = ("organisation", "scope", "scope_id")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_ID_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    scope: str
    scope_id: str
    def __init__(self, organisation: _Optional[str] = ..., scope: _Optional[str] = ..., scope_id: _Optional[str] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("organisation", "scope", "scope_id", "amount", "soft", "thresholds", "by")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_ID_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    SOFT_FIELD_NUMBER: _ClassVar[int]
    THRESHOLDS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    scope: str
    scope_id: str
    amount: int
    soft: bool
    thresholds: _containers.RepeatedScalarFieldContainer[int]
    by: str
    def __init__(self, organisation: _Optional[str] = ..., scope: _Optional[str] = ..., scope_id: _Optional[str] = ..., amount: _Optional[int] = ..., soft: _Optional[bool] = ..., thresholds: _Optional[_Iterable[int]] = ..., by: _Optional[str] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("organisation", "legal_name", "address", "country", "tax_id", "tax_name", "tax_ppm", "email", "time_zone", "prepaid", "terms_days", "webhook_url", "webhook_secret")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    LEGAL_NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COUNTRY_FIELD_NUMBER: _ClassVar[int]
    TAX_ID_FIELD_NUMBER: _ClassVar[int]
    TAX_NAME_FIELD_NUMBER: _ClassVar[int]
    TAX_PPM_FIELD_NUMBER: _ClassVar[int]
    EMAIL_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    PREPAID_FIELD_NUMBER: _ClassVar[int]
    TERMS_DAYS_FIELD_NUMBER: _ClassVar[int]
    WEBHOOK_URL_FIELD_NUMBER: _ClassVar[int]
    WEBHOOK_SECRET_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    legal_name: str
    address: str
    country: str
    tax_id: str
    tax_name: str
    tax_ppm: int
    email: str
    time_zone: str
    prepaid: bool
    terms_days: int
    webhook_url: str
    webhook_secret: str
    def __init__(self, organisation: _Optional[str] = ..., legal_name: _Optional[str] = ..., address: _Optional[str] = ..., country: _Optional[str] = ..., tax_id: _Optional[str] = ..., tax_name: _Optional[str] = ..., tax_ppm: _Optional[int] = ..., email: _Optional[str] = ..., time_zone: _Optional[str] = ..., prepaid: _Optional[bool] = ..., terms_days: _Optional[int] = ..., webhook_url: _Optional[str] = ..., webhook_secret: _Optional[str] = ...) -> None: ...

class Seller(_message.Message):
    __slots__ = ("legal_name", "address", "country", "tax_id", "email")
    LEGAL_NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COUNTRY_FIELD_NUMBER: _ClassVar[int]
    TAX_ID_FIELD_NUMBER: _ClassVar[int]
    EMAIL_FIELD_NUMBER: _ClassVar[int]
    legal_name: str
    address: str
    country: str
    tax_id: str
    email: str
    def __init__(self, legal_name: _Optional[str] = ..., address: _Optional[str] = ..., country: _Optional[str] = ..., tax_id: _Optional[str] = ..., email: _Optional[str] = ...) -> None: ...

class SloPromise(_message.Message):
    __slots__ = ("model", "tier", "from_ms", "attainment_ppm", "credit_ppm", "by")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_PPM_FIELD_NUMBER: _ClassVar[int]
    CREDIT_PPM_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    model: str
    tier: str
    from_ms: int
    attainment_ppm: int
    credit_ppm: int
    by: str
    def __init__(self, model: _Optional[str] = ..., tier: _Optional[str] = ..., from_ms: _Optional[int] = ..., attainment_ppm: _Optional[int] = ..., credit_ppm: _Optional[int] = ..., by: _Optional[str] = ...) -> None: ...

class Month(_message.Message):
    __slots__ = ("month", "organisation", "issue")
    MONTH_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    ISSUE_FIELD_NUMBER: _ClassVar[int]
    month: str
    organisation: str
    issue: bool
    def __init__(self, month: _Optional[str] = ..., organisation: _Optional[str] = ..., issue: _Optional[bool] = ...) -> None: ...

class InvoiceRef(_message.Message):
    __slots__ = ("organisation", "id")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    id: str
    def __init__(self, organisation: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class InvoiceState(_message.Message):
    __slots__ = ("organisation", "id", "number", "state", "total_cents", "due_cents")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_CENTS_FIELD_NUMBER: _ClassVar[int]
    DUE_CENTS_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    id: str
    number: str
    state: str
    total_cents: int
    due_cents: int
    def __init__(self, organisation: _Optional[str] = ..., id: _Optional[str] = ..., number: _Optional[str] = ..., state: _Optional[str] = ..., total_cents: _Optional[int] = ..., due_cents: _Optional[int] = ...) -> None: ...

class Invoices(_message.Message):
    __slots__ = ("invoices",)
    INVOICES_FIELD_NUMBER: _ClassVar[int]
    invoices: _containers.RepeatedCompositeFieldContainer[InvoiceState]
    def __init__(self, invoices: _Optional[_Iterable[_Union[InvoiceState, _Mapping]]] = ...) -> None: ...

class Payment(_message.Message):
    __slots__ = ("organisation", "id", "provider", "reference", "amount_cents", "by")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_CENTS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    id: str
    provider: str
    reference: str
    amount_cents: int
    by: str
    def __init__(self, organisation: _Optional[str] = ..., id: _Optional[str] = ..., provider: _Optional[str] = ..., reference: _Optional[str] = ..., amount_cents: _Optional[int] = ..., by: _Optional[str] = ...) -> None: ...

class NewCreditNote(_message.Message):
    __slots__ = ("organisation", "id", "amount_cents", "reason", "idempotency", "refund")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_CENTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_FIELD_NUMBER: _ClassVar[int]
    REFUND_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    id: str
    amount_cents: int
    reason: str
    idempotency: str
    refund: bool
    def __init__(self, organisation: _Optional[str] = ..., id: _Optional[str] = ..., amount_cents: _Optional[int] = ..., reason: _Optional[str] = ..., idempotency: _Optional[str] = ..., refund: _Optional[bool] = ...) -> None: ...

class PaymentCustomer(_message.Message):
    __slots__ = ("organisation", "reference")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    reference: str
    def __init__(self, organisation: _Optional[str] = ..., reference: _Optional[str] = ...) -> None: ...

class ProviderMessage(_message.Message):
    __slots__ = ("provider", "body", "signature")
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    provider: str
    body: bytes
    signature: str
    def __init__(self, provider: _Optional[str] = ..., body: _Optional[bytes] = ..., signature: _Optional[str] = ...) -> None: ...

class ShareGroup(_message.Message):
    __slots__ = ("name", "by")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    name: str
    by: str
    def __init__(self, name: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class ShareGroupMade(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ShareConsent(_message.Message):
    __slots__ = ("organisation", "group_id", "consents", "by")
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CONSENTS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    organisation: str
    group_id: str
    consents: bool
    by: str
    def __init__(self, organisation: _Optional[str] = ..., group_id: _Optional[str] = ..., consents: _Optional[bool] = ..., by: _Optional[str] = ...) -> None: ...
