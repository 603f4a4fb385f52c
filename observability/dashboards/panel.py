"""What a dashboard is made of. Every panel says its unit, when to worry and what is healthy."""

import msgspec


class Query(msgspec.Struct, frozen=True):
    """One PromQL expression and how its series are named."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One time series. `warn` and `alarm` are thresholds in the panel's unit; `healthy` says it in words."""

    title: str
    queries: tuple[Query, ...]
    unit: str  # Grafana's name of it
    description: str
    healthy: str
    warn: float | None = None
    alarm: float | None = None
    low_is_bad: bool = False
    stacked: bool = False


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """One dashboard: rows of panels."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def series(expr: str, legend: str = "") -> tuple[Query, ...]:
    """Return the queries of a panel that has one."""
    return (Query(expr, legend),)
