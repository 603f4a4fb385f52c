"""Usage and costs of an organisation: the question from a query string, the answer in OpenAI's shape or as CSV."""

import base64
import binascii
import csv
import io
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import queries
from contracts.errors import BadRequest, DependencyDown
from gateway.auth import DATABASE_ERRORS
from gateway.numerals import whole_number
from gateway.schemas.answers import money_text
from gateway.schemas.organization import Amount, Bucket, CostResult, Page, Spent, UsageResult
from gateway.tenant_read import tenant_read

R = TypeVar("R")

_LIMITS: Final = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}  # buckets a page: default, most
_COST_LIMITS: Final = (7, 180)
_NANO_PER_UNIT: Final = 1_000_000_000
_LAST_S: Final = 253_402_214_400  # the year 9999

Query = Mapping[str, Sequence[str]]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One page of at most `limit` buckets; the question goes to `end_s`, Unix seconds."""

    asked: queries.Asked
    limit: int
    end_s: int

    @property
    def next_s(self) -> int | None:
        """Return where the next page starts; None: this is the last."""
        return self.asked.end_s if self.asked.end_s < self.end_s else None

    @property
    def buckets_left(self) -> int:
        """Return how many buckets this page and those after it have."""
        return -((self.asked.start_s - self.end_s) // self.asked.width_s)

    def after(self) -> "Span | None":
        """Return the next page."""
        if self.next_s is None:
            return None
        last_s = _last_bucket_s(self.next_s, self.end_s, limit=self.limit, width_s=self.asked.width_s)
        return msgspec.structs.replace(
            self, asked=msgspec.structs.replace(self.asked, start_s=self.next_s, end_s=last_s)
        )


class UsageReports:
    """Reads reports. Errors: BadRequest, DependencyDown."""

    def __init__(
        self, engine: AsyncEngine, *, currency: str, now_s: Callable[[], int] = lambda: int(time.time())
    ) -> None:
        self._engine = engine
        self.currency = currency
        self._now_s = now_s

    async def usage(self, org: str, query: Query, *, only_project: str | None) -> Page[UsageResult]:
        """Return tokens and requests by bucket; `only_project`: of this one alone."""
        span = self.usage_span(query, only_project)
        found = await self.used(org, span)
        return _page(span, [(one.start_s, self._usage_result(one)) for one in found])

    async def costs(self, org: str, query: Query, *, only_project: str | None) -> Page[CostResult]:
        """Return money by bucket; `only_project`: of this one alone."""
        span = self.cost_span(query, only_project)
        found = await self.charged(org, span)
        return _page(span, [(one.start_s, self._cost_result(one)) for one in found])

    def usage_span(self, query: Query, only_project: str | None) -> Span:
        """Return the first page of a question about usage. Raises BadRequest."""
        width = _one(query, "bucket_width", "1d")
        if width not in _LIMITS:
            raise BadRequest("bucket_width must be 1m, 1h or 1d.", param="bucket_width")
        return self._span(query, width, _LIMITS[width], queries.USAGE_DIMENSIONS, only_project)

    def cost_span(self, query: Query, only_project: str | None) -> Span:
        """Return the first page of a question about costs. Raises BadRequest."""
        if _one(query, "bucket_width", "1d") != "1d":
            raise BadRequest("bucket_width of costs must be 1d.", param="bucket_width")
        return self._span(query, "1d", _COST_LIMITS, queries.COST_DIMENSIONS, only_project)

    async def used(self, org: str, span: Span) -> Sequence[queries.UsageResult]:
        """Return the usage of a page. Raises DependencyDown."""
        return await self._read(org, lambda db: queries.usage_buckets(db, org, span.asked))

    async def charged(self, org: str, span: Span) -> Sequence[queries.CostResult]:
        """Return the costs of a page. Raises DependencyDown."""
        return await self._read(org, lambda db: queries.cost_buckets(db, org, span.asked))

    async def _read(self, org: str, read: Callable[[AsyncConnection], Awaitable[Sequence[R]]]) -> Sequence[R]:
        try:
            async with tenant_read(self._engine, org) as db:
                return await read(db)
        except DATABASE_ERRORS:
            raise DependencyDown("Usage cannot be read right now.", retry_after_s=1) from None

    def _span(
        self, query: Query, width: str, limits: tuple[int, int], dimensions: Sequence[str], only_project: str | None
    ) -> Span:
        width_s = queries.WIDTHS_S[width]
        start_s = _whole(query, "start_time", None)
        end_s = _whole(query, "end_time", self._now_s())
        limit = _whole(query, "limit", limits[0])
        if not 1 <= limit <= limits[1]:
            raise BadRequest(f"limit must be 1 to {limits[1]}.", param="limit")
        if end_s <= start_s:
            raise BadRequest("end_time must be after start_time.", param="end_time")
        groups = _many(query, "group_by")
        unknown = [name for name in groups if name not in dimensions]
        if unknown:
            raise BadRequest(f"group_by takes {', '.join(dimensions)}, not {unknown[0]}.", param="group_by")
        projects = _many(query, "project_ids")
        if only_project is not None:
            projects = tuple(set(projects) & {only_project}) if projects else (only_project,)
            projects = projects or ("",)  # another one's: nothing
        page = _one(query, "page", "")
        first_s = _cursor(page) if page else start_s // width_s * width_s
        last_s = _last_bucket_s(first_s, end_s, limit=limit, width_s=width_s)
        asked = queries.Asked(
            start_s=first_s,
            end_s=last_s,
            width_s=width_s,
            group_by=tuple(dict.fromkeys(groups)),
            projects=projects,
            keys=_many(query, "api_key_ids"),
            models=_many(query, "models"),
            users=_many(query, "user_ids"),
            line_items=_many(query, "line_items"),
            batch=_flag(query, "batch"),
        )
        return Span(asked=asked, limit=limit, end_s=end_s)

    def _usage_result(self, one: queries.UsageResult) -> UsageResult:
        return UsageResult(
            input_tokens=one.computed + one.cached,
            output_tokens=one.decode,
            input_cached_tokens=one.cached,
            input_uncached_tokens=one.computed,
            num_model_requests=one.requests,
            project_id=one.project_id,
            user_id=one.user_id,
            api_key_id=one.api_key_id,
            model=one.model,
            batch=one.batch,
            service_tier=one.service_tier,
            pdgate=Spent(
                prefill_computed=one.computed,
                prefill_cached=one.cached,
                decode=one.decode,
                cost=money_text(one.cost),
                cost_nano=one.cost,
                currency=self.currency,
            ),
        )

    def _cost_result(self, one: queries.CostResult) -> CostResult:
        value = one.cost / _NANO_PER_UNIT
        amount = Amount(value=value, currency=self.currency.lower(), nano=one.cost)
        return CostResult(
            amount=amount,
            quantity=one.tokens,
            quantity_unit=None if one.tokens is None else "tokens",
            line_item=one.line_item,
            project_id=one.project_id,
            user_id=one.user_id,
            api_key_id=one.api_key_id,
        )


def as_csv(page: Page[Any]) -> str:
    """Return a page as CSV: one row per result, nested fields with dots."""
    rows = [
        {"start_time": bucket.start_time, "end_time": bucket.end_time, **_flat(msgspec.to_builtins(result))}
        for bucket in page.data
        for result in bucket.results
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["start_time", "end_time"])
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _page(span: Span, results: Iterable[tuple[int, R]]) -> Page[R]:
    by_bucket: dict[int, list[R]] = {}
    for start_s, result in results:
        by_bucket.setdefault(start_s, []).append(result)
    asked = span.asked
    data = [
        Bucket(start_time=start_s, end_time=start_s + asked.width_s, results=by_bucket.get(start_s, []))
        for start_s in range(asked.start_s, asked.end_s, asked.width_s)
    ]
    next_page = None
    if span.next_s is not None:
        next_page = "page_" + base64.urlsafe_b64encode(str(span.next_s).encode()).decode().rstrip("=")
    return Page(data=data, has_more=next_page is not None, next_page=next_page)


def _last_bucket_s(first_s: int, end_s: int, *, limit: int, width_s: int) -> int:
    """Return where a page ends that starts at `first_s`: with the last whole bucket that the question touches."""
    return min(first_s + limit * width_s, -(-end_s // width_s) * width_s)


def _cursor(page: str) -> int:
    try:
        raw = page.removeprefix("page_")
        start_s = whole_number(base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).decode(), most=_LAST_S)
    except (ValueError, binascii.Error):
        start_s = None
    if start_s is None:
        raise BadRequest("page is not one that this endpoint gave.", param="page")
    return start_s


def _many(query: Query, name: str) -> tuple[str, ...]:
    """Return a list parameter, written `name=a&name=b` or `name[]=a`."""
    return (*query.get(name, ()), *query.get(f"{name}[]", ()))


def _one(query: Query, name: str, default: str) -> str:
    values = query.get(name, ())
    return values[-1] if values else default


def _whole(query: Query, name: str, default: int | None) -> int:
    text = _one(query, name, "")
    if not text and default is not None:
        return default
    number = whole_number(text, most=_LAST_S)
    if number is None:
        raise BadRequest(f"{name} must be a whole number of Unix seconds or buckets.", param=name)
    return number


def _flag(query: Query, name: str) -> bool | None:
    match _one(query, name, ""):
        case "":
            return None
        case "true":
            return True
        case "false":
            return False
    raise BadRequest(f"{name} must be true or false.", param=name)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _safe(value: Any) -> Any:
    """Return a value that a spreadsheet does not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
