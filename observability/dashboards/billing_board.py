"""Whether every token finds its way into the ledger."""

from typing import Final

from observability.dashboards.panel import Board, Panel, series

BILLING: Final = Board(
    uid="pdgate-billing",
    title="pdgate / billing health",
    description="Whether every token finds its way into the ledger.",
    rows=(
        (
            "Pipeline",
            (
                Panel(
                    title="Usage events waiting",
                    queries=series("max(pdgate_usage_stream_lag)", "waiting"),
                    unit="short",
                    description="Events in Redis that are not in the database yet.",
                    healthy="below 1,000",
                    warn=1000,
                    alarm=10_000,
                ),
                Panel(
                    title="Usage rows",
                    queries=series("sum by (result) (rate(pdgate_usage_rows_total[5m]))", "{{result}}"),
                    unit="short",
                    description="Meter rows a second by what became of them. Repeated = delivered twice, counted once.",
                    healthy="posted",
                    stacked=True,
                ),
                Panel(
                    title="Dead letters",
                    queries=series("max(pdgate_usage_dead_letters)", "buried"),
                    unit="short",
                    description="Events that could not be posted.",
                    healthy="0",
                    alarm=1,
                ),
                Panel(
                    title="Redis file failing",
                    queries=series("max(pdgate_redis_file_failing)", "failing"),
                    unit="short",
                    description="1 while Redis cannot write its append-only file and refuses every change.",
                    healthy="0",
                    alarm=1,
                ),
            ),
        ),
        (
            "Books",
            (
                Panel(
                    title="Usage restored",
                    queries=series("sum by (source) (increase(pdgate_usage_restored_total[15m]))", "{{source}}"),
                    unit="short",
                    description="Settlements that Redis acknowledged and lost, and that were made again.",
                    healthy="0",
                    warn=1,
                ),
                Panel(
                    title="Ledger drift",
                    queries=series("max(pdgate_ledger_drift_ratio)", "drift"),
                    unit="percentunit",
                    description="Largest difference of a tenant and day between usage, workers' records and ledger.",
                    healthy="0",
                    warn=0.0005,
                    alarm=0.001,
                ),
                Panel(
                    title="Settlements waiting",
                    queries=series("sum(pdgate_settlements_waiting)", "waiting"),
                    unit="short",
                    description="Ended requests whose reservations are still taken.",
                    healthy="below 50",
                    warn=50,
                    alarm=500,
                ),
                Panel(
                    title="Workers' cost rows",
                    queries=series("sum by (result) (rate(pdgate_attempt_rows_total[5m]))", "{{result}}"),
                    unit="short",
                    description="The workers' own counts: cost of every attempt, and the figure to reconcile with.",
                    healthy="posted",
                    stacked=True,
                ),
            ),
        ),
    ),
)
