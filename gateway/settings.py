"""Settings of the gateway process, read from `GATEWAY_*`."""

from pathlib import Path
from typing import Annotated

import msgspec

from contracts.environment import RedisUrl, Secret, SettingsError, host_and_port
from observability.tracing import Ratios

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
PositiveCount = Annotated[int, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gateway process settings. One process is one gateway; more gateways are more processes."""

    redis_url: RedisUrl
    database_url: str
    catalog: Path
    models_dir: Path  # one folder per tokenizer, each appearing when it is ready
    journal_dir: Path  # settlements that wait for Redis, kept over a restart
    listen: str = "127.0.0.1:8080"  # [::]:8080 = all addresses, of IPv4 too
    request_timeout_s: PositiveSeconds = 600.0
    otlp_endpoint: str = ""
    """OTLP/gRPC collector, http://host:4317; empty = no traces."""
    trace_sample: str = "0.01"
    """Share of traces by tier, as in 0.01,priority=0.1; misses and failures are always kept."""
    first_token_s: PositiveSeconds = 60.0  # of an attempt that is placed, and is not the last
    first_token_s_per_1000: PositiveSeconds = 20.0  # more for each 1,000 prompt tokens
    between_tokens_s: PositiveSeconds = 60.0
    link_check_s: PositiveSeconds = 1.0  # in which a worker must answer when no tokens come from it
    log_level: str = "INFO"
    log_json: bool = True
    shutdown_grace_s: PositiveSeconds = 1.0  # running streams may still end by themselves
    discovery_s: PositiveSeconds = 1.0  # between two looks at the workers' leases
    tokenizer_threads: PositiveCount = 2
    trusted_proxies: tuple[str, ...] = ()  # networks whose x-forwarded-for is believed, CIDR
    allow_http: bool = False  # the portal over plain http, also from other machines
    session_idle_s: PositiveSeconds = 2 * 3600.0  # a browser that is silent for so long is signed out
    session_absolute_s: PositiveSeconds = 12 * 3600.0  # after the sign-in
    openid_issuer: str = ""  # URL of an OpenID provider at which people may sign in; empty = none
    openid_client_id: str = ""
    openid_client_secret: Secret = Secret("")
    openid_name: str = "single sign-on"
    billing_admin_token: Secret = Secret("")  # of billing's Admin service; empty = nothing about money can be written
    peer_token: Secret = Secret("")  # shown to workers: one of those that they accept; of several, by commas, the first
    tls_ca: str = ""  # PEM: with the next two, TLS in both directions between our processes
    tls_cert: str = ""  # PEM: shown to other processes, as server and as client
    tls_key: str = ""  # PEM: of tls_cert
    tls_name: str = ""  # name that the certificates of our servers carry; empty = their host
    decision_log: str = ""  # folder of the schedulers' decision logs, where this process can read it
    max_body_bytes: PositiveCount = 8 * 1024 * 1024
    head_timeout_s: PositiveSeconds = 30.0  # for the head of a request, also the next one on a connection kept open
    body_timeout_s: PositiveSeconds = 60.0  # from the head of a request to the end of its body
    inbox_max_bytes: PositiveCount = 256 * 1024 * 1024
    inbox_max_entries: PositiveCount = 20_000
    max_streams: PositiveCount = 8192  # in this process, queued ones included
    key_cache_entries: PositiveCount = 10_000
    cache_salt_key: Secret = Secret("pdgate")  # equal in every gateway of an installation
    outage_requests_per_key: int = 4  # let in while Redis does not answer, until it does; 0 = none
    outage_requests: int = 64  # of all keys together
    settlements_in_memory: PositiveCount = 20_000
    response_ttl_s: PositiveSeconds = 3600.0  # how long a stored response may be retrieved and continued
    text_max_bytes: PositiveCount = 128 * 1024  # of a prompt, and of an answer, where an organisation has them stored
    max_file_bytes: PositiveCount = 100 * 1024 * 1024
    max_files_bytes: PositiveCount = 2 * 1024 * 1024 * 1024  # of all files of one organisation
    batch_lines_at_once: PositiveCount = 32  # of one batch
    journal_max_bytes: PositiveCount = 64 * 1024 * 1024

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of `listen`. Raises SettingsError."""
        return host_and_port("GATEWAY_LISTEN", self.listen)

    @property
    def trace_ratios(self) -> Ratios:
        """Return the shares of `trace_sample`. Raises SettingsError."""
        try:
            return Ratios.parse(self.trace_sample)
        except ValueError as error:
            raise SettingsError(f"GATEWAY_TRACE_SAMPLE: {error}") from None
