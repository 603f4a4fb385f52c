"""`/portal/fleet`: workers by role, queues, KV caches, the ratio and who changed roles; for operators."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from contracts.series import Flip, Point, summed_up
from gateway.portal.roles import Right
from gateway.portal.views.charts import Chart, Series
from gateway.portal.views.controls import MODES, FleetControls
from gateway.portal.views.desk import Desk

HOURS: Final = {"15m": ("15 minutes", 0.25), "1h": ("1 hour", 1.0), "6h": ("6 hours", 6.0), "24h": ("24 hours", 24.0)}
_MOST_POINTS: Final = 180  # 15 minutes of points as they are
_FLIPS: Final = 20


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A change of role, with its time, Unix seconds."""

    at_s: float
    flip: Flip


def fleet_view_routes(desk: Desk, controls: FleetControls) -> list[HTTPRouteHandler]:
    """Return the handler of the fleet's page."""

    @get("/portal/fleet")
    async def get_fleet(request: Request[Any, Any, Any]) -> Response[str]:
        """Show workers, queues, KV caches, the ratio and who changed roles."""
        visit = await desk.enter(request, Right.FLEET)
        pools = list(dict.fromkeys(desk.catalog.pools))
        pool = request.query_params.get("pool", "")
        pool = pool if pool in pools else pools[0]
        span = request.query_params.get("span", "1h")
        span = span if span in HOURS else "1h"
        course = await desk.course(pool, HOURS[span][1])
        seen = summed_up(course, _MOST_POINTS)
        moved = [Moved(at_s=one.at_unix_ms / 1000, flip=flip) for one in reversed(course) for flip in one.flips]
        return desk.show(
            request,
            "fleet",
            visit,
            pools=[(name, name) for name in pools],
            pool=pool,
            spans=[(name, words[0]) for name, words in HOURS.items()],
            span=span,
            workers=sorted(desk.fleet.pool(pool).workers, key=lambda one: (one.role.value, one.worker_id)),
            inbox=desk.fleet.pool(pool),
            last=course[-1] if course else None,
            charts=_charts(seen),
            moved=moved[:_FLIPS],
            controls=await controls.seen(pool, request.query_params),
            modes=MODES,
        )

    return [get_fleet]


def _charts(seen: Sequence[Point]) -> Sequence[Chart]:
    times = [one.at_unix_ms // 1000 for one in seen]

    def chart(id_: str, title: str, unit: str, **columns: Sequence[float | None]) -> Chart:
        series = [Series(name=name.replace("_", " "), values=values) for name, values in columns.items()]
        return Chart(id=id_, title=title, unit=unit, times=times, series=series)

    wanted = [_target_ratio(one.target) for one in seen]
    return [
        chart(
            "workers",
            "Ready workers by role",
            "workers",
            Prefill=[one.prefill for one in seen],
            Decode=[one.decode for one in seen],
            Unified=[one.unified for one in seen],
        ),
        chart(
            "ratio",
            "Prefill to decode: actual and wanted",
            "workers",
            Actual=[one.prefill / one.decode if one.decode else None for one in seen],
            Wanted=wanted,
        ),
        chart(
            "queue",
            "Waiting and running",
            "count",
            Waiting=[one.num_waiting for one in seen],
            Running=[one.num_running for one in seen],
        ),
        chart("kv", "KV cache of decode workers in use", "percent", In_use=[one.decode_use for one in seen]),
        chart("met", "Requests that met their targets", "percent", Met=[one.attainment for one in seen]),
        chart(
            "rate",
            "Requests a second",
            "workers",
            Coming=[one.rate_rps for one in seen],
            Predicted_goodput=[one.goodput_rps for one in seen],
        ),
    ]


def _target_ratio(target: str) -> float | None:
    """Return prefill over decode of a split such as `4P3D1U`; None when it has no decode workers."""
    numbers: dict[str, int] = {}
    digits = ""
    for letter in target:
        if letter.isdecimal():
            digits += letter
        elif digits:
            numbers[letter], digits = int(digits), ""
    return numbers.get("P", 0) / numbers["D"] if numbers.get("D") else None
