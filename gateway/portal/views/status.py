"""`/portal/status` for everybody, `/portal/fleet/targets` for operators: what is served, and how well."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from billing import queries
from contracts.lifecycle import WorkerState
from gateway.portal.roles import Right
from gateway.portal.views.charts import Chart, Series
from gateway.portal.views.desk import Desk
from gateway.portal.views.ranges import CHOICES, range_of


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a tenant sees it."""

    model: str
    ready: bool
    missing: str
    workers: int
    attainment: float | None


def status_view_routes(desk: Desk) -> list[HTTPRouteHandler]:
    """Return the handlers of status and targets."""

    @get("/portal/status")
    async def get_status(request: Request[Any, Any, Any]) -> Response[str]:
        """Show whether each model can be asked now."""
        visit = await desk.enter(request, Right.READ)
        found = []
        for name, model in desk.catalog.models.items():
            pool = desk.catalog.pool_of(name)
            missing = desk.fleet.missing_path(pool, model.hand_off)
            course = await desk.course(pool, 1.0)
            met, judged = sum(one.met for one in course), sum(one.met + one.missed for one in course)
            ready = [one for one in desk.fleet.pool(pool).workers if one.state is WorkerState.READY]
            found.append(
                PoolStatus(
                    model=name,
                    ready=missing is None,
                    missing=missing or "",
                    workers=len(ready),
                    attainment=met / judged if judged else None,
                )
            )
        return desk.show(request, "status", visit, pools=found)

    @get("/portal/fleet/targets")
    async def get_targets(request: Request[Any, Any, Any]) -> Response[str]:
        """Show targets by model and tier, how many requests met them, and what missed ones are blamed on."""
        visit = await desk.enter(request, Right.FLEET)
        chosen = range_of(request.query_params.get("range"), desk.now_s())
        async with desk.reading_across_tenants() as db:
            went = {
                name: await queries.health_across_tenants(db, chosen.span, model=name) for name in desk.catalog.models
            }
        blamed: dict[str, Mapping[str, int]] = {}
        for pool in desk.catalog.pools:
            stages: dict[str, int] = {}
            for one in await desk.course(pool, 24.0):
                for stage, misses in one.by_stage.items():
                    stages[stage] = stages.get(stage, 0) + misses
            blamed[pool] = dict(sorted(stages.items(), key=lambda pair: -pair[1]))
        series = [
            Series(name=name, values=[{one.start_s: one.attainment for one in seen}.get(at) for at in chosen.starts])
            for name, seen in went.items()
        ]
        chart = Chart(id="met", title="Targets met by model", unit="percent", times=chosen.starts, series=series)
        return desk.show(
            request,
            "targets",
            visit,
            range=chosen,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            models=desk.catalog.models,
            met={name: _share(seen) for name, seen in went.items()},
            blamed=blamed,
            chart=chart,
        )

    return [get_status, get_targets]


def _share(seen: Sequence[queries.Health]) -> float | None:
    met, missed = sum(one.met for one in seen), sum(one.missed for one in seen)
    return met / (met + missed) if met + missed else None
