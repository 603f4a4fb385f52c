"""The two phases, their ratio and the hand-off between them."""

from typing import Final

from observability.dashboards.panel import Board, Panel, Query, series

PD: Final = Board(
    uid="pdgate-pd",
    title="pdgate / prefill and decode",
    description="Queues of both phases, the PD ratio and why it moves, and the KV hand-off.",
    rows=(
        (
            "Queues",
            (
                Panel(
                    title="Prefill queue",
                    queries=series('max by (pool) (pdgate_prefill_pool_queue_depth{pool=~"$pool"})', "{{pool}}"),
                    unit="short",
                    description="Requests that wait for a worker or for the end of their prefill.",
                    healthy="0 to 3",
                    warn=4,
                    alarm=8,
                ),
                Panel(
                    title="Decode utilisation",
                    queries=series('max by (pool) (pdgate_decode_pool_utilization{pool=~"$pool"})', "{{pool}}"),
                    unit="percentunit",
                    description="KV tokens in use over the capacity of ready workers that decode.",
                    healthy="70 to 85 %",
                    warn=0.85,
                    alarm=0.9,
                ),
                Panel(
                    title="Queue wait p99",
                    queries=series('pdgate_queue_wait_p99{pool=~"$pool"}', "{{pool}}"),
                    unit="s",
                    description="From the gateway's inbox entry to a placement.",
                    healthy="below 50 ms",
                    warn=0.2,
                    alarm=1,
                ),
                Panel(
                    title="Placements by path and reason",
                    queries=series(
                        'sum by (path, reason) (rate(pdgate_placements_total{pool=~"$pool"}[5m]))',
                        "{{path}} {{reason}}",
                    ),
                    unit="reqps",
                    description="How requests run: pd, unified, fallback or local, and why.",
                    healthy="no fallback",
                    stacked=True,
                ),
            ),
        ),
        (
            "Ratio",
            (
                Panel(
                    title="PD ratio, actual against chosen",
                    queries=(
                        Query('max by (pool) (pdgate_pd_ratio_actual{pool=~"$pool"})', "{{pool}} actual"),
                        Query('max by (pool) (pdgate_pd_ratio_config{pool=~"$pool"})', "{{pool}} chosen"),
                    ),
                    unit="none",
                    description="Ready prefill workers per ready decode worker, beside what was chosen.",
                    healthy="equal, except while one worker drains",
                ),
                Panel(
                    title="Workers by role and state",
                    queries=series('max by (role, state) (pdgate_workers{pool=~"$pool"})', "{{role}} {{state}}"),
                    unit="short",
                    description="As the leading scheduler sees them.",
                    healthy="all ready",
                    stacked=True,
                ),
                Panel(
                    title="Flips by reason",
                    queries=series(
                        'sum by (direction, reason, result) (increase(pdgate_flips_total{pool=~"$pool"}[5m]))',
                        "{{direction}} {{reason}} {{result}}",
                    ),
                    unit="short",
                    description="Role changes of workers in 5 minutes.",
                    healthy="none at steady load; at most one in 5 minutes",
                    warn=2,
                ),
                Panel(
                    title="Controller's decisions by reason",
                    queries=series(
                        'sum by (reason) (rate(pdgate_controller_ticks_total{pool=~"$pool"}[5m]))', "{{reason}}"
                    ),
                    unit="short",
                    description="Why the controller moved a worker or did not.",
                    healthy="mostly balanced",
                ),
            ),
        ),
        (
            "Workers by demand",
            (
                Panel(
                    title="Workers asked for",
                    queries=series('max by (pool, role) (pdgate_workers_desired{pool=~"$pool"})', "{{pool}} {{role}}"),
                    unit="short",
                    description="What the autoscaler asks for; beside it, who is there: Workers by role and state.",
                    healthy="what is there, but for starts under way",
                    stacked=True,
                ),
                Panel(
                    title="Starts and stops by reason",
                    queries=series(
                        'sum by (step, role, reason) (increase(pdgate_scale_steps_total{pool=~"$pool"}[5m]))',
                        "{{step}} {{role}} {{reason}}",
                    ),
                    unit="short",
                    description="Workers that the autoscaler started and stopped in 5 minutes.",
                    healthy="none at steady load",
                ),
                Panel(
                    title="Cold start by part, p50",
                    queries=series(
                        "histogram_quantile(0.5, sum by (phase, le)"
                        ' (rate(pdgate_cold_start_seconds_bucket{pool=~"$pool"}[1h])))',
                        "{{phase}}",
                    ),
                    unit="s",
                    description="Asked for, process runs (place), registered (load), serves (warm).",
                    healthy="load is most of it",
                ),
            ),
        ),
        (
            "KV hand-off",
            (
                Panel(
                    title="KV hand-off p99",
                    queries=series('pdgate_kv_transfer_latency_p99{pool=~"$pool"}', "{{pool}} {{link}}"),
                    unit="s",
                    description="From the end of prefill to sent, by link.",
                    healthy="below 5 ms in a node, below 100 ms across",
                    warn=0.005,
                    alarm=0.1,
                ),
                Panel(
                    title="KV hit ratio",
                    queries=series("pdgate_kv_hit_ratio", "{{model}}"),
                    unit="percentunit",
                    description="Prompt tokens found in the KV cache, of all prompt tokens.",
                    healthy="depends on the traffic; a fall after a flip is its price",
                ),
                Panel(
                    title="Prompt tokens computed again and saved",
                    queries=(
                        Query(
                            'sum by (cause) (rate(pdgate_retry_prefill_tokens_total{pool=~"$pool"}[5m]))',
                            "again: {{cause}}",
                        ),
                        Query(
                            'sum by (hand_off) (rate(pdgate_saved_prefill_tokens_total{pool=~"$pool"}[5m]))',
                            "saved by {{hand_off}}",
                        ),
                    ),
                    unit="short",
                    description="Cost of retries and what continuations found in the cache.",
                    healthy="0; retries stop at a tenth of the prefill work",
                ),
            ),
        ),
    ),
)
