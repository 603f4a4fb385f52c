"""Whether users get what they were promised."""

from typing import Final

from observability.dashboards.panel import Board, Panel, Query, series

SLO: Final = Board(
    uid="pdgate-slo",
    title="pdgate / SLO overview",
    description="Whether users get what they were promised, and how fast the error budget goes.",
    rows=(
        (
            "Attainment",
            (
                Panel(
                    title="Attainment by tier and model",
                    queries=(
                        Query('pdgate_request_slo_met_ratio{model=~"$model"}', "{{model}} {{tier}}"),
                        Query("pdgate_slo_objective", "objective"),
                    ),
                    unit="percentunit",
                    description="Share of admitted requests that met all their targets, over 5 minutes.",
                    healthy="above the objective",
                    warn=0.97,
                    alarm=0.95,
                    low_is_bad=True,
                ),
                Panel(
                    title="Attainment with refusals as misses",
                    queries=series('pdgate_request_slo_met_ratio_with_refusals{model=~"$model"}', "{{model}}"),
                    unit="percentunit",
                    description="The same, with requests that were refused for want of capacity counted as missed.",
                    healthy="within a point of attainment; a gap means shedding",
                    warn=0.97,
                    alarm=0.95,
                    low_is_bad=True,
                ),
                Panel(
                    title="Burn rate",
                    queries=tuple(
                        Query(
                            f'pdgate_slo_burn_rate:{window}{{model=~"$model"}}', f"{{{{model}}}} {{{{tier}}}} {window}"
                        )
                        for window in ("5m", "1h", "6h")
                    ),
                    unit="none",
                    description="1 = the error budget of 30 days lasts 30 days; 14.4 = it is gone in two days.",
                    healthy="below 1",
                    warn=1,
                    alarm=6,
                ),
                Panel(
                    title="Missed requests by phase blamed",
                    queries=series('pdgate_slo_misses:by_phase{model=~"$model"}', "{{model}} {{phase_blamed}}"),
                    unit="reqps",
                    description="One phase is blamed for each miss. Waiting for decode memory is decode's fault.",
                    healthy="near 0; one phase that stands out names the bottleneck",
                    stacked=True,
                ),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    title="Requests by status",
                    queries=series('sum by (status) (rate(pdgate_requests_total{model=~"$model|"}[5m]))', "{{status}}"),
                    unit="reqps",
                    description="Answers of the HTTP edge.",
                    healthy="mostly 200; 429 is a caller over its limit, 503 is our want of capacity",
                    stacked=True,
                ),
                Panel(
                    title="Refusals by reason",
                    queries=series("sum by (reason) (rate(pdgate_refusals_total[5m]))", "{{reason}}"),
                    unit="reqps",
                    description="Requests that were not served, by the code in the error.",
                    healthy="callers' own mistakes and limits only",
                ),
                Panel(
                    title="Tokens by meter",
                    queries=series('sum by (meter) (rate(pdgate_tokens_total{model=~"$model"}[5m]))', "{{meter}}"),
                    unit="short",
                    description="Metered tokens per second: prompt computed, prompt cached, decoded.",
                    healthy="follows the traffic",
                    stacked=True,
                ),
                Panel(
                    title="Share of tokens by tenants' rank",
                    queries=series("max by (rank) (pdgate_tenant_token_share)", "rank {{rank}}"),
                    unit="percentunit",
                    description="Traffic of the largest tenant and of the next nine, per gateway. Names: portal.",
                    healthy="depends on the tenants; a sudden rise of rank 1 explains a queue",
                    warn=0.8,
                ),
            ),
        ),
    ),
)
