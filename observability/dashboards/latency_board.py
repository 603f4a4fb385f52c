"""TTFT and TPOT, and where the time goes."""

from typing import Final

from observability.dashboards.panel import Board, Panel, Query, series

_BY_PHASE: Final = 'sum by (le, phase) (rate(pdgate_phase_seconds_bucket{model=~"$model"}[5m]))'

LATENCY: Final = Board(
    uid="pdgate-latency",
    title="pdgate / latency by phase",
    description="TTFT and TPOT as users see them, and where the time goes.",
    rows=(
        (
            "As users see it",
            (
                Panel(
                    title="TTFT p50 and p99",
                    queries=(
                        Query('pdgate_time_to_first_token_p99{model=~"$model"}', "{{model}} {{tier}} p99"),
                        Query(
                            "histogram_quantile(0.5, sum by (le, model, tier)"
                            ' (rate(pdgate_time_to_first_token_seconds_bucket{model=~"$model"}[5m])))',
                            "{{model}} {{tier}} p50",
                        ),
                    ),
                    unit="s",
                    description="Arrival at the gateway to the first token sent.",
                    healthy="p99 below the tier's target",
                ),
                Panel(
                    title="TPOT p50 and p99",
                    queries=(
                        Query('pdgate_time_per_output_token_p99{model=~"$model"}', "{{model}} {{tier}} p99"),
                        Query(
                            "histogram_quantile(0.5, sum by (le, model, tier)"
                            ' (rate(pdgate_time_per_output_token_seconds_bucket{model=~"$model"}[5m])))',
                            "{{model}} {{tier}} p50",
                        ),
                    ),
                    unit="s",
                    description="Mean gap between tokens of a request after the first.",
                    healthy="p99 below the tier's target",
                ),
                Panel(
                    title="Whole request p99",
                    queries=series(
                        "histogram_quantile(0.99, sum by (le, model)"
                        ' (rate(pdgate_request_duration_seconds_bucket{model=~"$model"}[5m])))',
                        "{{model}}",
                    ),
                    unit="s",
                    description="Arrival to the last token.",
                    healthy="follows the answers' length",
                ),
            ),
        ),
        (
            "Where the time goes",
            (
                Panel(
                    title="Time by phase, p50",
                    queries=series(
                        f"histogram_quantile(0.5, {_BY_PHASE})",
                        "{{phase}}",
                    ),
                    unit="s",
                    description="Queue, prefill, transfer and decode of a request.",
                    healthy="queue and transfer are small beside prefill",
                ),
                Panel(
                    title="Time by phase, p99",
                    queries=series(
                        f"histogram_quantile(0.99, {_BY_PHASE})",
                        "{{phase}}",
                    ),
                    unit="s",
                    description="The same at the tail.",
                    healthy="no phase but decode grows with load",
                ),
                Panel(
                    title="Settlement lag p99",
                    queries=series("pdgate_settlement_lag_p99", "settlement"),
                    unit="s",
                    description="End of a stream to its settlement in Redis.",
                    healthy="below 100 ms",
                    warn=0.5,
                    alarm=5,
                ),
            ),
        ),
    ),
)
