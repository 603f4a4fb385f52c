"""`/portal/usage`: usage over time by any dimension, compared with the time before, and as CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from billing import queries
from gateway.portal.door import AnyRequest, Visit
from gateway.portal.figures import METERS, NOTHING, PATHS, cell
from gateway.portal.roles import Right
from gateway.portal.views.charts import Chart, by_group, in_order
from gateway.portal.views.desk import Desk, Names
from gateway.portal.views.ranges import CHOICES, Range, range_of
from gateway.schemas.answers import money_text

MEASURES: Final = {"cost": ("Cost", "nano"), "tokens": ("Tokens", "count"), "requests": ("Requests", "count")}


class Row(msgspec.Struct, kw_only=True):
    """One group over the whole time; `before`: its cost in the time before, nano-units."""

    name: str
    requests: int = 0
    computed: int = 0
    cached: int = 0
    decode: int = 0
    cost: int = 0
    before: int = 0

    def add(self, one: queries.Explored) -> None:
        """Add a bucket."""
        self.requests += one.requests
        self.computed += one.computed
        self.cached += one.cached
        self.decode += one.decode
        self.cost += one.cost


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the address asks for."""

    range: Range
    by: str
    measure: str
    compare: bool
    only: Mapping[str, str]

    @property
    def query(self) -> Mapping[str, str]:
        """Return the query that asks the same."""
        asked = {"range": self.range.name, "by": self.by, "measure": self.measure, **self.only}
        return asked | ({"compare": "1"} if self.compare else {})


def usage_view_routes(desk: Desk) -> list[HTTPRouteHandler]:
    """Return the handlers of the usage explorer."""

    @get("/portal/usage")
    async def explore_usage(request: Request[Any, Any, Any]) -> Response[str]:
        """Show usage by group, as a chart and as a table."""
        visit = await desk.enter(request, Right.USAGE)
        asked = _question(request, visit, desk)
        names = await desk.names(visit.tenant)
        async with desk.reading(visit) as db:
            used = await queries.explore(db, visit.tenant, asked.range.span, dimension=asked.by, only=asked.only)
            before: Sequence[queries.Explored] = ()
            if asked.compare:
                before = await queries.explore(
                    db, visit.tenant, asked.range.before, dimension=asked.by, only=asked.only
                )
        rows = _rows(used, before, asked.by, names)
        measures = [(name, words[0]) for name, words in MEASURES.items() if name != "cost" or visit.may(Right.COSTS)]
        return desk.show(
            request,
            "usage",
            visit,
            range=asked.range,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            query=asked.query,
            by=asked.by,
            measure=asked.measure,
            measures=measures,
            compare=asked.compare,
            dimensions=list(queries.EXPLORED),
            filters={
                "project": list(names.projects.items()),
                "key": list(names.keys.items()),
                "model": [(name, name) for name in desk.catalog.models],
            },
            chart=_chart(asked, used, names),
            rows=rows,
            total=_total(rows),
            model=desk.any_model(),
        )

    @get("/portal/usage.csv")
    async def export_usage(request: Request[Any, Any, Any]) -> Response[str]:
        """Return the same as CSV: a row for each bucket and group."""
        visit = await desk.enter(request, Right.USAGE)
        asked = _question(request, visit, desk)
        names = await desk.names(visit.tenant)
        async with desk.reading(visit) as db:
            used = await queries.explore(db, visit.tenant, asked.range.span, dimension=asked.by, only=asked.only)
        return Response(
            _csv(asked, used, names, costs=visit.may(Right.COSTS), currency=desk.catalog.currency),
            media_type="text/csv",
            headers={"content-disposition": f'attachment; filename="usage-by-{asked.by}-{asked.range.name}.csv"'},
        )

    return [explore_usage, export_usage]


def _question(request: AnyRequest, visit: Visit, desk: Desk) -> Question:
    asked = request.query_params
    by = asked.get("by", "model")
    measure = asked.get("measure", "cost")
    if measure not in MEASURES or (measure == "cost" and not visit.may(Right.COSTS)):
        measure = "tokens"
    return Question(
        range=range_of(asked.get("range"), desk.now_s()),
        by=by if by in queries.EXPLORED else "model",
        measure=measure,
        compare=asked.get("compare") == "1",
        only={name: asked[name] for name in ("project", "key", "model") if asked.get(name)},
    )


def _named(by: str, label: str | None, names: Names) -> str:
    if by == "meter":
        return METERS.get(label or "", label or NOTHING)
    if by == "path":
        return PATHS.get(label or "", "Not placed")
    return names.of(by, label)


def _rows(used: Sequence[queries.Explored], before: Sequence[queries.Explored], by: str, names: Names) -> Sequence[Row]:
    found: dict[str | None, Row] = {}
    for one in used:
        found.setdefault(one.label, Row(name=_named(by, one.label, names))).add(one)
    for one in before:
        found.setdefault(one.label, Row(name=_named(by, one.label, names))).before += one.cost
    return sorted(found.values(), key=lambda row: (-row.cost, -row.requests, row.name))


def _total(rows: Sequence[Row]) -> Row:
    total = Row(name="Total")
    for row in rows:
        for name in ("requests", "computed", "cached", "decode", "cost", "before"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
    return total


def _chart(asked: Question, used: Sequence[queries.Explored], names: Names) -> Chart:
    words, unit = MEASURES[asked.measure]
    cells = [(one.start_s, _named(asked.by, one.label, names), float(getattr(one, asked.measure))) for one in used]
    series = by_group(cells, asked.range.starts)
    if asked.by == "meter":
        series = in_order(series, {words: words for words in METERS.values()})
    title = f"{words} by {asked.by}"
    return Chart(id="usage", title=title, unit=unit, times=asked.range.starts, series=series, stacked=True)


def _csv(asked: Question, used: Sequence[queries.Explored], names: Names, *, costs: bool, currency: str) -> str:
    out = io.StringIO()
    rows = csv.writer(out)
    head = ["start_unix_s", asked.by, f"{asked.by}_name", "requests", "prefill_computed", "prefill_cached", "decode"]
    rows.writerow([*head, *(["cost", "currency"] if costs else [])])
    for one in used:
        cells = [one.start_s, cell(one.label or ""), cell(_named(asked.by, one.label, names))]
        figures = [one.requests, one.computed, one.cached, one.decode]
        rows.writerow([*cells, *figures, *([money_text(one.cost), currency] if costs else [])])
    return out.getvalue()
