"""The table of docs/scaling.md that follows from `python -m benches.scale`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).with_name("results") / "scale.json"

Row = Mapping[str, float]


def box_table(found: Mapping[str, Any] | None = None) -> str:
    """Return the table of what was measured, by part and size; of the last results without `found`."""
    if found is None:
        found = json.loads(RESULTS.read_text())
    lines = ["| Part | Size | CPU µs | else |", "|---|---|---|---|"]
    for part, (unit, more) in _SHOWN.items():
        if part not in found:
            continue
        rows: Mapping[str, Row] = found[part]["sizes"]
        for size, row in rows.items():
            lines.append(f"| {part} | {int(size):,} | {row['us']:,.1f} {unit} | {more(row)} |")
        lines.append(f"| | slope | {found[part]['slope']:+.2f} | |")
    return "\n".join(lines)


def _of_workers(row: Row) -> str:
    idle = ", ".join(f"{name} {row[f'{name}_idle_share']:.1%}" for name in ("gateway", "scheduler", "valkey"))
    return f"idle, of a core: {idle}"


_SHOWN: Final[Mapping[str, tuple[str, Callable[[Row], str]]]] = {
    "gateways": ("a token, all processes", lambda row: f"gateways {row['gateways_us']:.1f}"),
    "workers": ("a request: gateway, scheduler, Valkey", _of_workers),
    "queued": ("a turn", lambda row: f"{row['bytes']:,.0f} B a waiting request"),
    "keys": (
        "a call with a key that the gateway has not seen: gateway, Valkey, PostgreSQL",
        lambda row: (
            f"{row['known_us']:,.0f} µs once it knows the key; {row['bytes']:,.0f} B a key in PostgreSQL,"
            f" {row['gateway_bytes']:,.0f} B of a gateway that has seen it"
        ),
    ),
    "tenants": ("of Valkey, reserve and settle", lambda row: f"{row['bytes']:,.0f} B a tenant"),
}
