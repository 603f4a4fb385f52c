"""`/portal/fleet/prices` and `/margin`: what is paid, and what is left of it; for operators."""

from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from billing import queries
from contracts.catalog import Catalog
from contracts.series import NUM_POINTS, PERIOD_S
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.portal.views.margins import margin_lines
from gateway.portal.views.ranges import CHOICES, range_of

_KNOWN_HOURS: Final = NUM_POINTS * PERIOD_S / 3600  # of the course of a pool
_MOST_RATE: Final = Decimal(1_000_000)


def economics_view_routes(desk: Desk) -> list[HTTPRouteHandler]:
    """Return the handlers of prices and margin."""

    @get("/portal/fleet/prices")
    async def get_prices(request: Request[Any, Any, Any]) -> Response[str]:
        """Show every version of every price, newest first."""
        visit = await desk.enter(request, Right.FLEET)
        async with desk.reading_across_tenants() as db:
            versions = await queries.list_prices(db)
        names = {one.id: one.name for one in await desk.tenants.list_organisations()}
        newest = sorted(versions, key=lambda one: (one.price.model, -one.price.version))
        now_ms = int(desk.now_s() * 1000)
        return desk.show(request, "prices", visit, versions=newest, names=names, now_ms=now_ms)

    @get("/portal/fleet/margin")
    async def get_margin(request: Request[Any, Any, Any]) -> Response[str]:
        """Show revenue less what workers cost, by tenant, model and phase; the price of a worker's hour is asked."""
        visit = await desk.enter(request, Right.FLEET)
        chosen = range_of(request.query_params.get("range"), desk.now_s())
        rate = _rate(request.query_params.get("rate", ""))
        async with desk.reading_across_tenants() as db:
            earned = await queries.earned_across_tenants(db, chosen.span)
            worked = await queries.worked_across_tenants(db, chosen.span)
        organisations = await desk.tenants.list_organisations()
        names = {one.id: f"{one.name} (DEMO)" if one.is_demo else one.name for one in organisations}
        hours = (chosen.span.end_s - chosen.span.start_s) / 3600
        ready_s = await _ready_s(desk, hours) if hours <= _KNOWN_HOURS else {}
        lines = margin_lines(earned, worked, names, nano_per_hour=rate, ready_s=ready_s, pool_of=_pool_of(desk.catalog))
        return desk.show(
            request,
            "margin",
            visit,
            range=chosen,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            lines=lines,
            rate=request.query_params.get("rate", ""),
            priced=rate > 0,
            knows_idle=hours <= _KNOWN_HOURS,
        )

    return [get_prices, get_margin]


async def _ready_s(desk: Desk, hours: float) -> Mapping[str, float]:
    """Return by pool for how many seconds of the last hours its workers were ready, all of them added up."""
    found = {}
    for pool in dict.fromkeys(desk.catalog.pools):
        course = await desk.course(pool, hours)
        found[pool] = sum((one.prefill + one.decode + one.unified) * PERIOD_S for one in course)
    return found


def _pool_of(catalog: Catalog) -> Callable[[str], str]:
    return lambda model: catalog.pool_of(model) if model in catalog.models else model  # one that was removed


def _rate(text: str) -> int:
    try:
        rate = Decimal(text.strip() or "0")
    except InvalidOperation:
        return 0
    if not rate.is_finite() or rate <= 0:
        return 0
    return int(min(rate, _MOST_RATE) * 1_000_000_000)  # 9e999999 would take long to write out
