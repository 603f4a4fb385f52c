"""Lists in pages: `?limit=…&cursor=…`, where the cursor is the id of the last thing on the page before."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
from litestar import Request

from contracts.errors import BadRequest
from gateway.numerals import whole_number

T = TypeVar("T")

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 200


class ListOf(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One page. `next_cursor` is null on the last one."""

    data: Sequence[T]
    has_more: bool = False
    next_cursor: str | None = None
    object: str = "list"


def limit_of(request: Request[Any, Any, Any]) -> int:
    """Return how many are asked for. Raises BadRequest."""
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    limit = whole_number(text, most=MAX_LIMIT)
    if not limit:
        raise BadRequest(f"'limit' is 1 to {MAX_LIMIT}.", param="limit")
    return limit


def page(request: Request[Any, Any, Any], everything: Sequence[T], name: Callable[[T], str]) -> ListOf[T]:
    """Return the page of a list that is asked for. Raises BadRequest for a cursor that is not of this list."""
    limit = limit_of(request)
    start = 0
    if cursor := request.query_params.get("cursor"):
        start = next((place for place, one in enumerate(everything, start=1) if name(one) == cursor), 0)
        if not start:
            raise BadRequest("This 'cursor' is not of this list, or what it names is gone.", param="cursor")
    data = everything[start : start + limit]
    more = start + limit < len(everything)
    return ListOf(data=data, has_more=more, next_cursor=name(data[-1]) if more else None)
