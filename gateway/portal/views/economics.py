"""`/portal/fleet/tenants`, `/prices` and `/margin`: who pays what, and what is left of it; for operators."""

from decimal import Decimal, InvalidOperation
from typing import Any, Final

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from billing import queries
from contracts.series import PERIOD_S
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.portal.views.margins import margin_lines
from gateway.portal.views.ranges import CHOICES, range_of

_MOST_RATE: Final = Decimal(1_000_000)


def economics_view_routes(desk: Desk) -> list[HTTPRouteHandler]:
    """Return the handlers of tenants, prices and margin."""

    @get("/portal/fleet/tenants")
    async def get_tenants(request: Request[Any, Any, Any]) -> Response[str]:
        """Show every organisation and what it used."""
        visit = await desk.enter(request, Right.FLEET)
        chosen = range_of(request.query_params.get("range") or "30d", desk.now_s())
        async with desk.reading_across_tenants() as db:
            totals = await queries.usage_totals_across_tenants(db, chosen.span.start_s * 1000, demo_week=True)
        used: dict[str, tuple[int, int, int]] = {}
        for one in totals:
            requests, tokens, cost = used.get(one.organisation, (0, 0, 0))
            of_one = one.requests if one.meter == "decode" else 0
            used[one.organisation] = (requests + of_one, tokens + one.tokens, cost + one.cost)
        return desk.show(
            request,
            "tenants",
            visit,
            range=chosen,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            organisations=await desk.tenants.list_organisations(),
            used=used,
        )

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
        lines = margin_lines(earned, worked, names, nano_per_hour=rate)
        ready_s = 0.0
        for pool in desk.catalog.pools:
            ready_s += sum((one.prefill + one.decode + one.unified) * PERIOD_S for one in await desk.course(pool, 24.0))
        return desk.show(
            request,
            "margin",
            visit,
            range=chosen,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            lines=lines,
            rate=request.query_params.get("rate", ""),
            priced=rate > 0,
            ready_s=ready_s,
        )

    return [get_tenants, get_prices, get_margin]


def _rate(text: str) -> int:
    try:
        rate = Decimal(text.strip() or "0")
    except InvalidOperation:
        return 0
    if not rate.is_finite() or rate <= 0:
        return 0
    return int(min(rate, _MOST_RATE) * 1_000_000_000)  # 9e999999 would take long to write out
