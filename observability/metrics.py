"""Every instrument: name, unit, help and allowed labels. Nothing else creates one.

Labels are bounded: pool, model, tier, role, reason and the like. Never a tenant, a key, a request id
or an address: those belong on log lines. Seconds and bytes; values in ms are converted here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry

from observability.instrument import Counter, Declared, Faults, Gauges, Histogram, Observe

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 20, 60)
TPOT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.4, 0.5, 1)
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
TOTAL_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
MOVE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120)
BOOT_BUCKETS_S = (0.1, 0.3, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)


def _by_name(*declared: Declared) -> Mapping[str, Declared]:
    return MappingProxyType({d.name: d for d in declared})


COUNTERS: Final = _by_name(
    # gateway
    Declared("requests", "HTTP requests by route, status and model.", ("route", "status", "model")),
    Declared("refusals", "Refused requests by reason.", ("reason", "status", "pool")),
    Declared(
        "request_slo",
        "Admitted requests by whether all SLO targets were met, and the phase blamed for a miss.",
        ("met", "phase_blamed", "tier", "model"),
    ),
    Declared("tokens", "Metered tokens by meter and model.", ("meter", "model")),
    Declared("stored_texts", "Prompts and answers of organisations that have them stored, by result.", ("result",)),
    Declared("limiter_refusals", "Requests over a limit, by limit and by whose it is.", ("limit", "scope")),
    # scheduler
    Declared("placements", "Placements by path and reason.", ("pool", "path", "reason")),
    Declared("retries", "Attempts after the first, by cause.", ("pool", "cause")),
    Declared("retry_prefill_tokens", "Prompt tokens computed again for retries, by cause.", ("pool", "cause")),
    Declared("saved_prefill_tokens", "Prompt tokens a continuation found in the KV cache.", ("pool", "hand_off")),
    Declared("controller_ticks", "Decisions of the ratio controller by reason.", ("pool", "mode", "reason")),
    Declared(
        "flips", "Role changes of workers by direction, reason and result.", ("pool", "direction", "reason", "result")
    ),
    Declared("scale_ticks", "Decisions of the autoscaler by reason.", ("pool", "mode", "reason")),
    Declared(
        "scale_steps", "Workers started and stopped by the autoscaler, by reason.", ("pool", "step", "role", "reason")
    ),
    Declared(
        "worker_transitions", "Changes of a worker's state as the scheduler sees it.", ("pool", "role", "from", "to")
    ),
    # worker
    Declared("engine_finishes", "Engine requests by phase and reason.", ("pool", "phase", "reason")),
    Declared(
        "prompt_tokens", "Prompt tokens of engine requests, by where they were found.", ("pool", "phase", "source")
    ),
    # billing
    Declared("usage_rows", "Usage rows by what became of them.", ("result",)),
    Declared("attempt_rows", "Attempt cost rows by what became of them.", ("result",)),
    Declared("usage_restored", "Settlements that Redis acknowledged and lost, and who had kept them.", ("source",)),
)

HISTOGRAMS: Final = _by_name(
    Declared("time_to_first_token_seconds", "Arrival to first token.", ("model", "tier"), TTFT_BUCKETS_S),
    Declared(
        "time_per_output_token_seconds",
        "Mean gap after the first token, per request.",
        ("model", "tier"),
        TPOT_BUCKETS_S,
    ),
    Declared("request_duration_seconds", "Arrival to last token.", ("model", "tier"), TOTAL_BUCKETS_S),
    Declared("phase_seconds", "Time of a request in one phase.", ("model", "phase"), TTFT_BUCKETS_S),
    Declared("settlement_lag_seconds", "End of a stream to its settlement.", ("model",), LAG_BUCKETS_S),
    Declared("queue_wait_seconds", "Inbox to placed.", ("pool", "tier"), TTFT_BUCKETS_S),
    Declared(
        "kv_transfer_latency_seconds",
        "KV hand-off, from the end of prefill to sent.",
        ("pool", "hand_off", "link"),
        TRANSFER_BUCKETS_S,
    ),
    Declared(
        "drain_seconds", "Waiting for a worker to become idle before its role changes.", ("pool",), MOVE_BUCKETS_S
    ),
    Declared("switch_seconds", "The engine's own role change.", ("pool",), MOVE_BUCKETS_S),
    Declared(
        "cold_start_seconds",
        "A worker's way from being asked for until it serves, by part: place, load, warm; or wake.",
        ("pool", "phase"),
        BOOT_BUCKETS_S,
    ),
    Declared("event_loop_lag_seconds", "How late the event loop wakes a timer.", (), LAG_BUCKETS_S),
)

_GAUGES: Final = (
    # gateway
    Declared("streams", "Requests in this gateway."),
    Declared(
        "tenant_token_share",
        "Share of the last minutes' tokens by tenants' rank: 1, 2-10, rest; 0 to 1.",
        ("rank",),
    ),
    Declared("settlements_waiting", "Ended requests that are not settled yet."),
    Declared("settlements_journalled", "Settlements that only the journal holds."),
    # scheduler
    Declared("leader", "1 if this process leads the pool.", ("pool",)),
    Declared("inbox_pending", "Unsettled inbox entries, as the leader sees.", ("pool",)),
    Declared("queue_age_seconds", "Age of the oldest request that waits to be placed.", ("pool", "tier")),
    Declared("workers", "Workers by role and state.", ("pool", "role", "state")),
    Declared("worker_pairs", "Prefill and decode workers by how far they are a pair, or why not.", ("pool", "state")),
    Declared("prefill_pool_queue_depth", "Requests waiting for a worker or for their prefill.", ("pool",)),
    Declared("decode_pool_utilization", "KV tokens in use over capacity of ready decoders, 0 to 1.", ("pool",)),
    Declared("pd_ratio_actual", "Ready prefill workers per ready decode worker.", ("pool",)),
    Declared("pd_ratio_config", "Configured or chosen prefill workers per decode worker.", ("pool",)),
    Declared("workers_desired", "Workers the autoscaler asks for.", ("pool", "role")),
    Declared("workers_cost", "Cost of the pool's workers per hour, currency units.", ("pool",)),
    Declared(
        "expert_imbalance", "Hits of a mixture's busiest expert over the mean, mean of its layers.", ("pool", "role")
    ),
    Declared("expert_distance", "How differently prefill and decode hit a mixture's experts, 0 to 1.", ("pool",)),
    Declared("degrade_step", "Step of the degrade ladder; 0 = undisturbed.", ("pool",)),
    # worker
    Declared("worker_running", "Requests in the engine.", ("pool", "role")),
    Declared("worker_waiting", "Requests that wait for room.", ("pool", "role")),
    Declared("worker_kv_used", "Used part of the KV cache, 0 to 1.", ("pool", "role")),
    Declared("worker_progress_age_seconds", "Since the last token, chunk or idleness.", ("pool", "role")),
    # billing
    Declared("usage_stream_lag", "Usage events not in the database yet."),
    Declared("usage_dead_letters", "Usage events that were buried."),
    Declared("redis_file_failing", "1 while Redis cannot write its append-only file and refuses every change."),
    Declared("ledger_drift_ratio", "Largest difference between two books of a day, 0 to 1."),
)
GAUGES: Final[Mapping[str, Declared]] = MappingProxyType({d.full_name: d for d in _GAUGES})


class Instruments:
    """The instruments of one process, in a registry of their own. Latencies are given in ms."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.faults = Faults(self.registry)
        counters = {name: Counter(declared, self.registry, self.faults) for name, declared in COUNTERS.items()}
        self._histograms = {name: Histogram(d, self.registry, self.faults) for name, d in HISTOGRAMS.items()}
        self._gauges = Gauges(GAUGES, self.faults)
        self.registry.register(self._gauges)
        # gateway
        self.requests = counters["requests"]
        self.refusals = counters["refusals"]
        self.slo = counters["request_slo"]
        self.tokens = counters["tokens"]
        self.limiter_refusals = counters["limiter_refusals"]
        self.stored_texts = counters["stored_texts"]
        # scheduler
        self.placements = counters["placements"]
        self.retries = counters["retries"]
        self.retry_prefill_tokens = counters["retry_prefill_tokens"]
        self.saved_prefill_tokens = counters["saved_prefill_tokens"]
        self.controller_ticks = counters["controller_ticks"]
        self.flips = counters["flips"]
        self.scale_ticks = counters["scale_ticks"]
        self.scale_steps = counters["scale_steps"]
        self.worker_transitions = counters["worker_transitions"]
        # worker
        self.engine_finishes = counters["engine_finishes"]
        self.prompt_tokens = counters["prompt_tokens"]
        # billing
        self.usage_rows = counters["usage_rows"]
        self.attempt_rows = counters["attempt_rows"]
        self.usage_restored = counters["usage_restored"]

    def ttft(self, ms: float, *, trace_id: str = "", **labels: str) -> None:
        """Record a time to first token."""
        self._seconds("time_to_first_token_seconds", ms, labels, trace_id)

    def tpot(self, ms: float, *, trace_id: str = "", **labels: str) -> None:
        """Record a request's mean time per output token."""
        self._seconds("time_per_output_token_seconds", ms, labels, trace_id)

    def duration(self, ms: float, *, trace_id: str = "", **labels: str) -> None:
        """Record a request's whole time."""
        self._seconds("request_duration_seconds", ms, labels, trace_id)

    def phase(self, ms: float, **labels: str) -> None:
        """Record a request's time in one phase: queue, prefill, transfer, decode."""
        self._seconds("phase_seconds", ms, labels)

    def settlement_lag(self, ms: float, **labels: str) -> None:
        """Record the time from a stream's end to its settlement."""
        self._seconds("settlement_lag_seconds", ms, labels)

    def queue_wait(self, ms: float, **labels: str) -> None:
        """Record how long a request waited in the inbox."""
        self._seconds("queue_wait_seconds", ms, labels)

    def transfer(self, ms: float, **labels: str) -> None:
        """Record one KV hand-off."""
        self._seconds("kv_transfer_latency_seconds", ms, labels)

    def drain(self, ms: float, **labels: str) -> None:
        """Record how long a worker took to become idle before its role changed."""
        self._seconds("drain_seconds", ms, labels)

    def switch(self, ms: float, **labels: str) -> None:
        """Record the engine's own part of a role change."""
        self._seconds("switch_seconds", ms, labels)

    def cold_start(self, ms: float, **labels: str) -> None:
        """Record one part of a worker's start."""
        self._seconds("cold_start_seconds", ms, labels)

    def event_loop_lag(self, ms: float) -> None:
        """Record how late the event loop was."""
        self._seconds("event_loop_lag_seconds", ms, {})

    def observe(self, name: str, source: Observe) -> None:
        """Read a gauge of GAUGES from `source` whenever it is scraped. Raises ValueError when not declared."""
        self._gauges.observe(name, source)

    def _seconds(self, name: str, ms: float, labels: Mapping[str, str], trace_id: str = "") -> None:
        self._histograms[name].record(ms / 1000, labels, trace_id=trace_id)
