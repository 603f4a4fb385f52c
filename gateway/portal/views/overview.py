"""`/portal`: what the organisation spends, how its requests go."""

from collections.abc import Callable, Sequence
from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from billing import queries
from gateway.portal.figures import METERS
from gateway.portal.roles import Right
from gateway.portal.views.charts import Chart, Series, by_group, in_order
from gateway.portal.views.desk import Desk
from gateway.portal.views.ranges import CHOICES, Range, range_of
from gateway.portal.views.requests import meters_of
from gateway.portal.views.totals import total_of, total_of_period

_LATEST = 6


def overview_routes(desk: Desk) -> list[HTTPRouteHandler]:
    """Return the handler of the overview."""

    @get("/portal")
    async def get_overview(request: Request[Any, Any, Any]) -> Response[str]:
        """Show spend, tokens, requests, attainment and errors of a time."""
        visit = await desk.enter(request, Right.READ)
        chosen = range_of(request.query_params.get("range"), desk.now_s())
        tenant = visit.tenant
        async with desk.reading(visit) as db:
            used = await queries.explore(db, tenant, chosen.span, dimension="meter", only={})
            went = await queries.health(db, tenant, chosen.span)
            before = await queries.period(db, tenant, chosen.before)
            recent = await queries.recent_requests(db, tenant, chosen.span.start_s * 1000, _LATEST)
        charts = [*([_spend(chosen, used)] if visit.may(Right.COSTS) else []), *_charts(chosen, used, went)]
        return desk.show(
            request,
            "overview",
            visit,
            range=chosen,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            total=total_of(used, went),
            previous=total_of_period(before),
            charts=charts,
            recent=recent,
            meters=meters_of,
            model=desk.any_model(),
        )

    return [get_overview]


def _spend(chosen: Range, used: Sequence[queries.Explored]) -> Chart:
    cells = [(one.start_s, one.label or "", one.cost) for one in used]
    series = in_order(by_group(cells, chosen.starts), METERS)
    return Chart(id="spend", title="Spend by meter", unit="nano", times=chosen.starts, series=series, stacked=True)


def _charts(chosen: Range, used: Sequence[queries.Explored], went: Sequence[queries.Health]) -> list[Chart]:
    times = chosen.starts
    at = {one.start_s: one for one in went}
    tokens = in_order(by_group([(one.start_s, one.label or "", one.tokens) for one in used], times), METERS)

    def figures(read: Callable[[queries.Health], float | None], missing: float | None) -> list[float | None]:
        return [read(at[start_s]) if start_s in at else missing for start_s in times]

    ends = [
        Series(name="Answered", values=figures(lambda one: one.requests - one.failed, 0)),
        Series(name="Failed", values=figures(lambda one: one.failed, 0)),
    ]
    first = [
        Series(name="Half below", values=figures(lambda one: one.ttft_p50_ms, None)),
        Series(name="95 % below", values=figures(lambda one: one.ttft_p95_ms, None)),
    ]
    between = [
        Series(name="Half below", values=figures(lambda one: one.tpot_p50_ms, None)),
        Series(name="95 % below", values=figures(lambda one: one.tpot_p95_ms, None)),
    ]
    met = [Series(name="Targets met", values=figures(lambda one: one.attainment, None))]
    return [
        Chart(id="tokens", title="Tokens by meter", unit="count", times=times, series=tokens, stacked=True),
        Chart(id="requests", title="Requests", unit="count", times=times, series=ends, stacked=True),
        Chart(id="attainment", title="Requests that met their targets", unit="percent", times=times, series=met),
        Chart(id="ttft", title="Time to first token", unit="ms", times=times, series=first),
        Chart(id="tpot", title="Time per token after the first", unit="ms", times=times, series=between),
    ]
