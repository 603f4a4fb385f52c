"""`GET /v1/organization/usage/completions` and `GET /v1/organization/costs`."""

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from gateway.guard import Guard
from gateway.parquet import MEDIA_TYPE, ParquetExports
from gateway.schemas.organization import CostResult, Page, UsageResult
from gateway.usage_reports import Query, UsageReports, as_csv


def organization_routes(guard: Guard, reports: UsageReports, exports: ParquetExports) -> list[HTTPRouteHandler]:
    """Return the handlers of an organisation's usage and costs. A key that is no admin's sees its own project."""

    @get(
        "/v1/organization/usage/completions",
        summary="Get usage by time",
        operation_id="getOrganizationUsage",
        tags=["organization"],
    )
    async def get_usage(request: Request[Any, Any, Any]) -> Response[Page[UsageResult]] | Response[str] | Stream:
        """Return tokens and requests in buckets of 1m, 1h or 1d, in groups.

        As CSV when `accept` is text/csv, as Parquet when it is application/vnd.apache.parquet.
        """
        key = await guard.key_of(request)
        only = None if key.is_admin else key.project_id
        org, query = key.organisation_id, _query(request)
        if _accepts(request, MEDIA_TYPE):
            file = await exports.usage(org, query, only_project=only)
            return Stream(file, media_type=MEDIA_TYPE, headers=_named("usage"))
        return _answer(request, await reports.usage(org, query, only_project=only))

    @get(
        "/v1/organization/costs",
        summary="Get costs by day",
        operation_id="getOrganizationCosts",
        tags=["organization"],
    )
    async def get_costs(request: Request[Any, Any, Any]) -> Response[Page[CostResult]] | Response[str] | Stream:
        """Return money in buckets of a day, in groups of project and line item.

        As CSV when `accept` is text/csv, as Parquet when it is application/vnd.apache.parquet.
        """
        key = await guard.key_of(request)
        only = None if key.is_admin else key.project_id
        org, query = key.organisation_id, _query(request)
        if _accepts(request, MEDIA_TYPE):
            file = await exports.costs(org, query, only_project=only)
            return Stream(file, media_type=MEDIA_TYPE, headers=_named("costs"))
        return _answer(request, await reports.costs(org, query, only_project=only))

    return [get_usage, get_costs]


def _query(request: Request[Any, Any, Any]) -> Query:
    return {name: request.query_params.getall(name) for name in request.query_params}


def _answer(request: Request[Any, Any, Any], page: Page[Any]) -> Response[Any]:
    if _accepts(request, "text/csv"):
        return Response(as_csv(page), media_type="text/csv")
    return Response(page)


def _accepts(request: Request[Any, Any, Any], media_type: str) -> bool:
    return media_type in request.headers.get("accept", "")


def _named(what: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{what}.parquet"'}
