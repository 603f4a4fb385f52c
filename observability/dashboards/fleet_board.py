"""Workers and processes."""

from typing import Final

from observability.dashboards.panel import Board, Panel, Query, series

FLEET: Final = Board(
    uid="pdgate-fleet",
    title="pdgate / fleet",
    description="Processes: workers, gateways, schedulers, billing.",
    rows=(
        (
            "Workers",
            (
                Panel(
                    title="Requests in the engines",
                    queries=(
                        Query(
                            'sum by (pool, role) (pdgate_worker_running{pool=~"$pool"})', "{{pool}} {{role}} running"
                        ),
                        Query(
                            'sum by (pool, role) (pdgate_worker_waiting{pool=~"$pool"})', "{{pool}} {{role}} waiting"
                        ),
                    ),
                    unit="short",
                    description="Running and waiting requests by role.",
                    healthy="waiting near 0",
                ),
                Panel(
                    title="KV cache in use",
                    queries=series(
                        'max by (pool, role) (pdgate_worker_kv_used{pool=~"$pool"})', "{{pool}} {{role}} fullest"
                    ),
                    unit="percentunit",
                    description="The fullest worker of each role.",
                    healthy="below 85 %",
                    warn=0.85,
                    alarm=0.95,
                ),
                Panel(
                    title="How engine requests end",
                    queries=series(
                        'sum by (phase, reason) (rate(pdgate_engine_finishes_total{pool=~"$pool"}[5m]))',
                        "{{phase}} {{reason}}",
                    ),
                    unit="reqps",
                    description="Finish reasons of prefill, decode and unified requests.",
                    healthy="stop, length, aborted; no error, hand_off or deadline",
                ),
                Panel(
                    title="Retries by cause",
                    queries=series('sum by (cause) (rate(pdgate_retries_total{pool=~"$pool"}[5m]))', "{{cause}}"),
                    unit="reqps",
                    description="Attempts after the first.",
                    healthy="0",
                    warn=0.1,
                ),
            ),
        ),
        (
            "Processes",
            (
                Panel(
                    title="Streams",
                    queries=series("pdgate_streams", "{{instance}}"),
                    unit="short",
                    description="Requests held by each gateway.",
                    healthy="spread evenly",
                ),
                Panel(
                    title="Event loop lag p99",
                    queries=series("pdgate_event_loop_lag_p99", "{{job}} {{instance}}"),
                    unit="s",
                    description="How late timers fire. Every latency of that process includes it.",
                    healthy="below 20 ms",
                    warn=0.05,
                    alarm=0.1,
                ),
                Panel(
                    title="CPU",
                    queries=series('rate(process_cpu_seconds_total{job=~"pdgate-.*"}[5m])', "{{job}} {{instance}}"),
                    unit="short",
                    description="Cores in use by each process.",
                    healthy="below 0.8 for a gateway or a scheduler: each uses one core at most",
                    warn=0.8,
                ),
                Panel(
                    title="Memory",
                    queries=series('process_resident_memory_bytes{job=~"pdgate-.*"}', "{{job}} {{instance}}"),
                    unit="bytes",
                    description="Resident memory of each process.",
                    healthy="flat",
                ),
            ),
        ),
    ),
)
