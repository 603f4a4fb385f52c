"""What the measured costs come to at the size of docs/scaling.md: cores, processes and connections. Arithmetic only.

`python -m benches.scaling` prints the page's tables; after a new measurement `make docs` writes them there. Costs are
CPU, from benches/results: per request from the row of one-token requests, per further token from the row of 256
streams, less what their requests cost.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

RESULTS: Final = Path(__file__).parent / "results"
RATES: Final = (1_000, 10_000, 100_000, 1_000_000)
PROMPT_TOKENS, ANSWER_TOKENS, STEP_MS, TTFT_MS = 600, 60, 10.0, 100.0
METER_ROWS: Final = 3
FULL: Final = 0.6
"""Share of a core that a process may use before its queues grow."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """CPU microseconds by process."""

    per_request: Mapping[str, float]
    per_token: Mapping[str, float]
    per_meter_row: Mapping[str, float]


def measured(folder: Path = RESULTS) -> Costs:
    """Return the costs as `make bench` and `benches.billing` found them."""
    rows: dict[str, Any] = json.loads((folder / "latest.json").read_text())["rows"]
    short, long = (rows[name]["pdgate"] for name in ("1 token, 16 at once", "256 streams, 5 ms steps"))
    tokens = long["cpu_us_per_request"] / long["cpu_us_per_token"]
    per_request: dict[str, float] = short["us_per_token_by_process"]
    per_token = {
        name: max(0.0, cost - per_request[name] / tokens) for name, cost in long["us_per_token_by_process"].items()
    }
    billing = json.loads((folder / "billing.json").read_text())["ingest"]["cpu_us_per_row"]
    return Costs(per_request=per_request, per_token=per_token, per_meter_row=billing)


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What one rate of requests needs."""

    requests_per_s: int
    streams: int
    gateways: int
    leaders: int
    redis: int
    billing: int
    postgres_cores: float
    meter_rows_per_s: int
    inbox_mb_per_s: float


def size(costs: Costs, requests_per_s: int) -> Size:
    """Return how many processes, each with a core that is 60 % busy, carry the rate."""

    def processes(us_per_request: float) -> int:
        return max(1, math.ceil(requests_per_s * us_per_request / 1e6 / FULL))

    def of(name: str) -> float:
        return costs.per_request[name] + ANSWER_TOKENS * costs.per_token[name]

    rows = requests_per_s * METER_ROWS
    return Size(
        requests_per_s=requests_per_s,
        streams=round(requests_per_s * (TTFT_MS + ANSWER_TOKENS * STEP_MS) / 1000),
        gateways=processes(of("gateway")),
        leaders=processes(of("scheduler")),
        redis=processes(of("valkey")),
        billing=processes(METER_ROWS * costs.per_meter_row["billing"]),
        postgres_cores=rows * costs.per_meter_row["postgres"] / 1e6 / FULL,
        meter_rows_per_s=rows,
        inbox_mb_per_s=requests_per_s * PROMPT_TOKENS * 4 / 1e6,
    )


def size_table(costs: Costs, rates: Sequence[int] = RATES) -> str:
    """Return the page's first table."""
    columns = "Requests/s, Streams at once, Gateways, Leaders, Redis primaries, Billing, PostgreSQL cores"
    names = [*columns.split(", "), "Meter rows/s", "Inbox MB/s"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for rate in rates:
        s = size(costs, rate)
        lines.append(
            f"| {s.requests_per_s:,} | {s.streams:,} | {s.gateways:,} | {s.leaders:,} | {s.redis:,} | {s.billing:,}"
            f" | {s.postgres_cores:,.1f} | {s.meter_rows_per_s:,} | {s.inbox_mb_per_s:,.1f} |"
        )
    return "\n".join(lines)


def limit_table(costs: Costs) -> str:
    """Return the page's second table: what one process carries."""
    gateway = costs.per_request["gateway"] + ANSWER_TOKENS * costs.per_token["gateway"]
    lines = ["| One of | CPU µs a request | Requests/s at 60 % of a core |", "|---|---|---|"]
    for name, us in (
        ("gateway", gateway),
        ("scheduler, leading one pool", costs.per_request["scheduler"]),
        ("Redis primary", costs.per_request["valkey"]),
        ("billing", METER_ROWS * costs.per_meter_row["billing"]),
        ("PostgreSQL, one core", METER_ROWS * costs.per_meter_row["postgres"]),
    ):
        lines.append(f"| {name} | {us:,.0f} | {FULL * 1e6 / us:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    costs = measured()
    print(limit_table(costs), size_table(costs), sep="\n\n")


if __name__ == "__main__":
    main()
