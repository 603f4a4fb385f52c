"""Worker process settings, read from `WORKER_*`."""

from typing import Annotated, Literal

import msgspec

from contracts.environment import RedisUrl, Secret
from contracts.lifecycle import HandOff, Role, StoreKind
from contracts.perf import DEFAULT_LATENCY, DecodeCost, LatencyModel, PrefillCost, TransferCost, WeightsCost

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process. The second half holds for the timed engine only."""

    id: NotEmpty
    pool: NotEmpty
    role: Role
    engine: Literal["sglang", "timed", "http"]
    redis_url: RedisUrl
    catalog: NotEmpty  # path of models.toml
    listen: str = "127.0.0.1:0"
    peer_token: Secret = Secret("")  # asked of gateways and schedulers; several by commas; none = on loopback only
    tls_ca: str = ""  # PEM: with the next two, TLS in both directions between our processes
    tls_cert: str = ""  # PEM: shown to other processes, as server and as client
    tls_key: str = ""  # PEM: of tls_cert
    tls_name: str = ""  # name that the certificates of our servers carry; empty = their host
    open_health: bool = False  # answer the health service without the token, for probes that cannot send one
    advertise: str = ""  # host that peers use; empty = the host in `listen`
    model_path: str = ""  # folder; sglang needs it
    first_prompts: str = ""  # file, a prompt a line: computed before the worker takes requests
    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: Port = 0  # of prefill, and the next one in every second life (ADR 69); 0 = free ones
    hand_off: HandOff = HandOff.DIRECT
    store: StoreKind = StoreKind.FILE  # with `hand_off` store: where KV pages go
    store_dir: str = ""  # file: the folder that all workers of this machine share
    store_max_bytes: Annotated[int, msgspec.Meta(ge=2**20)] = 8 * 2**30  # file: bound of that folder
    store_master: str = ""  # mooncake: host:port of its master
    store_protocol: Literal["tcp", "rdma"] = "tcp"
    store_segment_bytes: Annotated[int, msgspec.Meta(ge=2**24)] = 2**30  # mooncake: memory that this worker lends
    hand_off_timeout_s: Positive = 5.0  # timed engine: from the end of prefill
    peer_timeout_s: Positive = 60.0  # sglang: whole wait for the other side of a hand-off, its queue included
    max_total_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # KV capacity; 0 = the engine's own default
    max_running: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0 = the engine's own default
    profile: str = ""  # name of one of workers/profiles, or a file that ends with .toml
    engine_options: str = "{}"  # JSON object: further arguments of sglang.Engine
    http_url: str = ""  # http engine: base URL of the server, without /v1
    http_model: str = ""  # its name of the model
    http_key: Secret = Secret("")
    http_fields: str = "{}"  # JSON object: further fields of every request to it
    ring_chunks: Annotated[int, msgspec.Meta(ge=16)] = 65_536
    coalesce_ms: NotNegative = 2.0
    reader_lost_s: Positive = 5.0
    progress_grace_s: Positive = 5.0
    drain_s: NotNegative = 0.0  # on SIGTERM: how long what runs may go on; 0 = it is continued elsewhere at once
    journal_dir: str = ""
    faults_file: str = ""  # test only: engine faults on demand (workers/engines/faults.py)
    metrics_listen: str = ""
    otlp_endpoint: str = ""  # OTLP/gRPC collector, http://host:4317; empty = no traces
    log_level: LogLevel = "INFO"
    log_json: bool = True
    zone: str = ""
    node: str = ""  # machine; empty = its host name
    sleeps: bool = False  # an idle worker may give its device's memory back (sglang: needs torch-memory-saver)

    step_ms: NotNegative = DEFAULT_LATENCY.decode.fixed_ms
    step_ms_per_request: NotNegative = DEFAULT_LATENCY.decode.per_request_ms
    step_ms_per_kv_token: NotNegative = DEFAULT_LATENCY.decode.per_kv_token_ms
    prefill_ms: NotNegative = DEFAULT_LATENCY.prefill.fixed_ms
    prefill_ms_per_token: NotNegative = DEFAULT_LATENCY.prefill.per_token_ms
    prefill_ms_per_token_pair: NotNegative = DEFAULT_LATENCY.prefill.per_token_pair_ms
    transfer_ms: NotNegative = DEFAULT_LATENCY.transfer.fixed_ms
    transfer_bytes_per_ms: Positive = DEFAULT_LATENCY.transfer.bytes_per_ms
    switch_ms: NotNegative = 100.0  # a role change by the engine's own call
    restart_ms: NotNegative = 5_000.0  # one to or from unified
    kv_bytes_per_token: Annotated[int, msgspec.Meta(gt=0)] = DEFAULT_LATENCY.transfer.kv_bytes_per_token
    weights_bytes: Annotated[int, msgspec.Meta(gt=0)] = 16_060_000_000  # with `sleeps`: what leaves the device
    host_bytes_per_ms: Positive = 5.0e7  # between host and device: 50 GB/s, PCIe 5 with 16 lanes

    @property
    def latency(self) -> LatencyModel:
        """What the timed engine plays."""
        return LatencyModel(
            prefill=PrefillCost(
                fixed_ms=self.prefill_ms,
                per_token_ms=self.prefill_ms_per_token,
                per_token_pair_ms=self.prefill_ms_per_token_pair,
            ),
            decode=DecodeCost(
                fixed_ms=self.step_ms,
                per_request_ms=self.step_ms_per_request,
                per_kv_token_ms=self.step_ms_per_kv_token,
            ),
            transfer=TransferCost(
                fixed_ms=self.transfer_ms,
                bytes_per_ms=self.transfer_bytes_per_ms,
                kv_bytes_per_token=self.kv_bytes_per_token,
            ),
            kv_capacity_tokens=self.max_total_tokens or DEFAULT_LATENCY.kv_capacity_tokens,
            max_running=self.max_running or DEFAULT_LATENCY.max_running,
            weights=WeightsCost(bytes=self.weights_bytes, bytes_per_ms=self.host_bytes_per_ms) if self.sleeps else None,
        )
