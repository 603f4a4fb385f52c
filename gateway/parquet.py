"""Usage and costs as Parquet: the whole span that is asked for, a row group for each page of buckets.

Pages are read one after the other, and each leaves as soon as it is encoded: memory holds one page, whatever the span.
A file that breaks off has no footer and cannot be read, so a part is never taken for the whole.

pyarrow (requirements/service.txt) is looked for with the first export: it is larger than the rest of a gateway, and
most gateways never write a file.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from billing import queries
from contracts.errors import BadRequest, ServingError
from gateway.usage_reports import Query, Span, UsageReports

R = TypeVar("R")

MEDIA_TYPE: Final = "application/vnd.apache.parquet"
MAX_BUCKETS: Final = 50_000
"""The longest span of one file: 34 days of minutes, 5 years of hours."""

_NANO: Final = Decimal(1_000_000_000)
_MONEY: Final = "money"  # decimal128(28, 9): every amount in nano-units fits, exactly
_USAGE: Final[Mapping[str, str]] = {
    "bucket_start": "moment",
    "bucket_end": "moment",
    "project_id": "text",
    "user_id": "text",
    "api_key_id": "text",
    "model": "text",
    "batch": "flag",
    "service_tier": "text",
    "num_model_requests": "count",
    "prefill_computed": "count",
    "prefill_cached": "count",
    "decode": "count",
    "cost_nano": "count",
    "cost": _MONEY,
    "currency": "text",
}
_COSTS: Final[Mapping[str, str]] = {
    "bucket_start": "moment",
    "bucket_end": "moment",
    "project_id": "text",
    "user_id": "text",
    "api_key_id": "text",
    "line_item": "text",
    "quantity": "count",
    "amount_nano": "count",
    "amount": _MONEY,
    "currency": "text",
}


class ParquetMissing(ServingError):
    """This gateway has no pyarrow."""

    code, type, http_status = "parquet_not_installed", "invalid_request_error", 406


class Writer(Protocol):
    """A Parquet file that is being written. Calls take a thread's time."""

    def add(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the bytes of a row group; none of no rows."""
        ...

    def end(self) -> bytes:
        """Return the footer."""
        ...


class ParquetExports:
    """Writes exports. Errors before the first byte: BadRequest, ParquetMissing, DependencyDown."""

    def __init__(self, reports: UsageReports) -> None:
        self._reports = reports
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parquet")

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def usage(self, org: str, query: Query, *, only_project: str | None) -> AsyncIterator[bytes]:
        """Return the file of `/v1/organization/usage/completions`, by row groups."""
        reports = self._reports
        first = reports.usage_span(query, only_project)
        return await self._written(_USAGE, first, lambda span: reports.used(org, span), self._usage_row)

    async def costs(self, org: str, query: Query, *, only_project: str | None) -> AsyncIterator[bytes]:
        """Return the file of `/v1/organization/costs`, by row groups."""
        reports = self._reports
        first = reports.cost_span(query, only_project)
        return await self._written(_COSTS, first, lambda span: reports.charged(org, span), self._cost_row)

    async def _written(
        self,
        columns: Mapping[str, str],
        first: Span,
        read: Callable[[Span], Awaitable[Sequence[R]]],
        row: Callable[[R, int], Mapping[str, Any]],
    ) -> AsyncIterator[bytes]:
        """Read the first page, so that what is wrong with the question has a status of its own; then give the rest."""
        if first.buckets_left > MAX_BUCKETS:
            raise BadRequest(
                f"A file has at most {MAX_BUCKETS} buckets; ask for a shorter span, or wider buckets.",
                param="start_time",
            )
        writer = await self._in_thread(partial(_writer, columns))
        found = await read(first)

        async def row_groups() -> AsyncIterator[bytes]:
            span, page = first, found
            while True:
                group = await self._in_thread(partial(writer.add, [row(one, span.asked.width_s) for one in page]))
                if group:
                    yield group
                following = span.after()
                if following is None:
                    break
                span = following
                page = await read(span)
            yield await self._in_thread(writer.end)

        return row_groups()

    async def _in_thread(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _usage_row(self, one: queries.UsageResult, width_s: int) -> Mapping[str, Any]:
        return {
            **_bucket(one.start_s, width_s),
            "project_id": one.project_id,
            "user_id": one.user_id,
            "api_key_id": one.api_key_id,
            "model": one.model,
            "batch": one.batch,
            "service_tier": one.service_tier,
            "num_model_requests": one.requests,
            "prefill_computed": one.computed,
            "prefill_cached": one.cached,
            "decode": one.decode,
            "cost_nano": one.cost,
            "cost": one.cost / _NANO,
            "currency": self._reports.currency,
        }

    def _cost_row(self, one: queries.CostResult, width_s: int) -> Mapping[str, Any]:
        return {
            **_bucket(one.start_s, width_s),
            "project_id": one.project_id,
            "user_id": one.user_id,
            "api_key_id": one.api_key_id,
            "line_item": one.line_item,
            "quantity": one.tokens,
            "amount_nano": one.cost,
            "amount": one.cost / _NANO,
            "currency": self._reports.currency,
        }


def _bucket(start_s: int, width_s: int) -> dict[str, datetime]:
    ends = datetime.fromtimestamp(start_s + width_s, UTC)
    return {"bucket_start": datetime.fromtimestamp(start_s, UTC), "bucket_end": ends}


def _writer(columns: Mapping[str, str]) -> Writer:
    """Return a file of these columns. Raises ParquetMissing."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - see the module
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise ParquetMissing("This gateway writes no Parquet: pyarrow is not installed. Ask for text/csv.") from None
    kinds = {
        "moment": pa.timestamp("us", tz="UTC"),
        "text": pa.string(),
        "flag": pa.bool_(),
        "count": pa.int64(),
        _MONEY: pa.decimal128(28, 9),
    }
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
    out = _Taken()
    file = pq.ParquetWriter(out, schema, compression="zstd")
    return _File(file, out, lambda rows: pa.Table.from_pylist(list(rows), schema=schema))


class _Taken:
    """What pyarrow writes to: bytes wait until they are taken."""

    closed = False

    def __init__(self) -> None:
        self._waiting: list[bytes] = []

    def write(self, data: Any) -> int:
        self._waiting.append(bytes(data))
        return len(self._waiting[-1])

    def flush(self) -> None:
        """Do nothing: what is written is there."""

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        whole = b"".join(self._waiting)
        self._waiting.clear()
        return whole


class _File:
    def __init__(self, file: Any, out: _Taken, table: Callable[[Sequence[Mapping[str, Any]]], Any]) -> None:
        self._file = file
        self._out = out
        self._table = table

    def add(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        if rows:
            self._file.write_table(self._table(rows))
        return self._out.take()

    def end(self) -> bytes:
        self._file.close()
        return self._out.take()
