"""What handlers of the admin API share."""

import datetime as dt
import re
from decimal import Decimal
from typing import Any, Final, TypeVar

import msgspec
from litestar import Request

from contracts.catalog import NANO_PER_UNIT
from contracts.errors import BadRequest
from gateway import bodies
from gateway.idempotency import SECRET
from gateway.schemas.decoding import decode_body
from gateway.scopes import NO_SCOPES, Scopes, WrongNetwork, check_scopes

T = TypeVar("T")

AnyRequest = Request[Any, Any, Any]

_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_FIRST_YEAR: Final = 2000
_LAST_YEAR: Final = 2200


async def taken(request: AnyRequest, kind: type[T]) -> T:
    """Return what a request brings. Raises BadRequest; `param` names the field."""
    raw = await bodies.read_by(request.body(), timeout_s=bodies.FORM_S) or b"{}"
    found = decode_body(raw, msgspec.json.Decoder(kind))
    if _NUL.search(raw):
        raise BadRequest("A text of the body has the character U+0000, which cannot be kept.")
    return found


def check_address(request: AnyRequest) -> None:
    """Raise BadRequest when the address holds a character that no name or id can have, and no database takes."""
    values = (*request.path_params.values(), *request.query_params.values())
    if any("\x00" in str(value) for value in values):
        raise BadRequest("The address has the character U+0000.")


def unix_ms(moment: dt.datetime | None, param: str) -> int:
    """Return a moment in Unix ms, 0 for none. Raises BadRequest for one that is out of all reason."""
    if moment is None:
        return 0
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise BadRequest(f"'{param}' is between the years {_FIRST_YEAR} and {_LAST_YEAR}.", param=param)
    return int(moment.timestamp() * 1000)


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
