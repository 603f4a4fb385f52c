"""`GET /v1/organization/usage/completions` and `GET /v1/organization/costs`."""

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.guard import Guard
from gateway.schemas.organization import CostResult, Page, UsageResult
from gateway.usage_reports import Query, UsageReports, as_csv


def organization_routes(guard: Guard, reports: UsageReports) -> list[HTTPRouteHandler]:
    """Return the handlers of an organisation's usage and costs. A key that is no admin's sees its own project."""

    @get(
        "/v1/organization/usage/completions",
        summary="Get usage by time",
        operation_id="getOrganizationUsage",
        tags=["organization"],
    )
    async def get_usage(request: Request[Any, Any, Any]) -> Response[Page[UsageResult]] | Response[str]:
        """Return tokens and requests in buckets of 1m, 1h or 1d, in groups; as CSV when `accept` is text/csv."""
        key = await guard.key_of(request)
        only = None if key.is_admin else key.project_id
        return _answer(request, await reports.usage(key.organisation_id, _query(request), only_project=only))

    @get(
        "/v1/organization/costs",
        summary="Get costs by day",
        operation_id="getOrganizationCosts",
        tags=["organization"],
    )
    async def get_costs(request: Request[Any, Any, Any]) -> Response[Page[CostResult]] | Response[str]:
        """Return money in buckets of a day, in groups of project and line item; as CSV when `accept` is text/csv."""
        key = await guard.key_of(request)
        only = None if key.is_admin else key.project_id
        return _answer(request, await reports.costs(key.organisation_id, _query(request), only_project=only))

    return [get_usage, get_costs]


def _query(request: Request[Any, Any, Any]) -> Query:
    return {name: request.query_params.getall(name) for name in request.query_params}


def _answer(request: Request[Any, Any, Any], page: Page[Any]) -> Response[Any]:
    if "text/csv" in request.headers.get("accept", ""):
        return Response(as_csv(page), media_type="text/csv")
    return Response(page)
