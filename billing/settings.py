"""Settings of the billing process, from `BILLING_*`."""

from typing import Annotated

import msgspec

from contracts.environment import RedisUrl, Secret

Positive = Annotated[int, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything billing is told. `metrics_listen` is host:port, empty = no metrics endpoint."""

    redis_url: RedisUrl
    database_url: str
    catalog: str  # path of models.toml
    metrics_listen: str = ""
    otlp_endpoint: str = ""  # OTLP/gRPC collector, http://host:4317; empty = no traces
    log_level: str = "INFO"
    log_json: bool = True
    consumers: Positive = 2  # in this process; one waits for Postgres while the other computes
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=5000)] = 500  # requests per transaction
    linger_s: Annotated[float, msgspec.Meta(ge=0)] = 0.5  # between small batches, so that they grow
    claim_idle_ms: Positive = 10_000  # entries that a consumer holds for longer are taken over
    keep_days: Positive | None = None  # metering rows of closed months stay so long; None = for ever
    admin_listen: str = "127.0.0.1:0"  # of the Admin service; its address is published in Redis
    admin_token: Secret = Secret("")  # empty = no Admin service
    tls_ca: str = ""  # PEM: with the next two, TLS in both directions for the Admin service
    tls_cert: str = ""  # PEM: shown to who calls it
    tls_key: str = ""  # PEM: of tls_cert
    stripe_api_key: Secret = Secret("")  # empty = invoices are paid by hand; needs requirements/service.txt
    stripe_webhook_secrets: tuple[
        Secret, ...
    ] = ()  # of the endpoint at /webhooks/payments/stripe; two while one changes
    stripe_api_base: str = "https://api.stripe.com"
    sweep_period_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
