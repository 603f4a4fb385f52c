"""Every instrument: name, unit, help and allowed labels. Nothing else creates one.

Labels are bounded: pool, model, tier, role, reason and the like. Never a tenant, a key, a request id
or an address: those belong on log lines. Seconds and bytes; values in ms are converted here.
"""

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TPOT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)

HISTOGRAM_VIEWS: Sequence[View] = tuple(
    View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(boundaries=buckets))
    for name, buckets in (
        ("pdgate_time_to_first_token_seconds", TTFT_BUCKETS_S),
        ("pdgate_time_per_output_token_seconds", TPOT_BUCKETS_S),
        ("pdgate_kv_transfer_latency_seconds", TRANSFER_BUCKETS_S),
        ("pdgate_queue_wait_seconds", TTFT_BUCKETS_S),
        ("pdgate_request_duration_seconds", TTFT_BUCKETS_S),
        ("pdgate_settlement_lag_seconds", TTFT_BUCKETS_S),
    )
)

Observe = Callable[[], Iterable[tuple[float, dict[str, str]]]]


class Instruments:
    """The instruments of one process. Latencies are given in ms and recorded in seconds."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        # gateway
        self.requests = meter.create_counter("pdgate_requests", description="Requests by route, status, model.")
        self.refusals = meter.create_counter("pdgate_refusals", description="Refused requests by reason.")
        self.slo = meter.create_counter(
            "pdgate_request_slo", description="Admitted requests by whether all SLO targets were met."
        )
        self.tokens = meter.create_counter("pdgate_tokens", description="Metered tokens by meter and model.")
        self._ttft = meter.create_histogram("pdgate_time_to_first_token_seconds", description="Arrival to first token.")
        self._tpot = meter.create_histogram(
            "pdgate_time_per_output_token_seconds", description="Mean gap after the first token, per request."
        )
        self._duration = meter.create_histogram("pdgate_request_duration_seconds", description="Arrival to settled.")
        self._settlement_lag = meter.create_histogram(
            "pdgate_settlement_lag_seconds", description="End of a stream to its settlement."
        )
        # scheduler
        self.placements = meter.create_counter("pdgate_placements", description="Placements by path and reason.")
        self.retries = meter.create_counter("pdgate_retries", description="Attempts after the first, by cause.")
        self._queue_wait = meter.create_histogram("pdgate_queue_wait_seconds", description="Inbox to placed.")
        # worker
        self._transfer = meter.create_histogram(
            "pdgate_kv_transfer_latency_seconds", description="KV hand-off, from the end of prefill to sent."
        )
        self.engine_finishes = meter.create_counter("pdgate_engine_finishes", description="Engine requests by reason.")
        # billing
        self.usage_rows = meter.create_counter("pdgate_usage_rows", description="Usage rows by what became of them.")
        self.attempt_rows = meter.create_counter(
            "pdgate_attempt_rows", description="Attempt cost rows by what became of them."
        )

    def ttft(self, ms: float, **labels: str) -> None:
        """Record a time to first token."""
        self._ttft.record(ms / 1000, labels)

    def tpot(self, ms: float, **labels: str) -> None:
        """Record a request's mean time per output token."""
        self._tpot.record(ms / 1000, labels)

    def duration(self, ms: float, **labels: str) -> None:
        """Record a request's whole time."""
        self._duration.record(ms / 1000, labels)

    def settlement_lag(self, ms: float, **labels: str) -> None:
        """Record the time from a stream's end to its settlement."""
        self._settlement_lag.record(ms / 1000, labels)

    def queue_wait(self, ms: float, **labels: str) -> None:
        """Record how long a request waited in the inbox."""
        self._queue_wait.record(ms / 1000, labels)

    def transfer(self, ms: float, **labels: str) -> None:
        """Record one KV hand-off."""
        self._transfer.record(ms / 1000, labels)

    def observe(self, name: str, observe: Observe, description: str) -> None:
        """Register a gauge that is read when scraped. `name` is one of GAUGES."""
        if name not in GAUGES:
            raise ValueError(f"{name} is not declared in GAUGES")

        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, labels) for value, labels in observe()]

        self._meter.create_observable_gauge(name, callbacks=[callback], description=description)


GAUGES = frozenset(
    {
        "pdgate_prefill_pool_queue_depth",
        "pdgate_decode_pool_utilization",
        "pdgate_pd_ratio_actual",
        "pdgate_pd_ratio_config",
        "pdgate_workers",
        "pdgate_leader",
        "pdgate_inbox_pending",
        "pdgate_streams",
        "pdgate_usage_stream_lag",
        "pdgate_usage_dead_letters",
        "pdgate_settlements_waiting",
        "pdgate_worker_running",
        "pdgate_worker_waiting",
        "pdgate_worker_kv_used",
    }
)
