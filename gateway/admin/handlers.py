"""What handlers of the admin API share."""

from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from litestar import Request

from contracts.catalog import NANO_PER_UNIT
from contracts.errors import BadRequest
from gateway.idempotency import SECRET
from gateway.schemas.decoding import decode_body
from gateway.scopes import NO_SCOPES, Scopes, WrongNetwork, check_scopes

T = TypeVar("T")

AnyRequest = Request[Any, Any, Any]


async def taken(request: AnyRequest, kind: type[T]) -> T:
    """Return what a request brings. Raises BadRequest; `param` names the field."""
    return decode_body(await request.body() or b"{}", msgspec.json.Decoder(kind))


def checked(scopes: Scopes | None) -> Scopes:
    """Return scopes that can be kept. Raises BadRequest."""
    try:
        return check_scopes(scopes or NO_SCOPES)
    except WrongNetwork as error:
        raise BadRequest(str(error), param="scopes.networks") from None


def holds_secret(request: AnyRequest) -> None:
    """Mark an answer that shows a secret: it is not kept for repetitions (gateway.idempotency)."""
    request.scope["state"][SECRET] = True


def nano_of(text: str) -> int:
    """Return money text of the shape MoneyText in nano-units."""
    return int(Decimal(text) * NANO_PER_UNIT)
