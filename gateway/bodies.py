"""Reading request bodies, bounded."""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from litestar.exceptions import InternalServerException
from litestar.types import Receive

from contracts.errors import BadRequest, BodyTooLarge, RequestTimeout, UnsupportedEncoding

T = TypeVar("T")

FORM_S: Final = 60.0
"""In which a form, or an order of an operator, is whole."""
_LEFT: Final = "The connection ended before the body did."
_DISCARD_FACTOR: Final = 8
"""A body that is too large is read on and thrown away up to this multiple of the limit: a client that is
still sending would otherwise see a reset connection, not the 413."""


async def read_body(receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body.

    Raises:
        BodyTooLarge: more than `max_bytes`.
        RequestTimeout: it was not whole within `timeout_s`.
        BadRequest: the client left before it had sent everything; it will not read this.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes=max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The request body was not whole within {timeout_s:g} s.") from None


async def read_by(reading: Awaitable[T], *, timeout_s: float) -> T:
    """Return what Litestar reads of a body; it has bounds of size, and none of time. Errors as of `read_body`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await reading
    except TimeoutError:
        raise RequestTimeout(f"The request body was not whole within {timeout_s:g} s.") from None
    except InternalServerException:  # so it names a client that left
        raise BadRequest(_LEFT) from None


def check_encoding(encoding: str | None) -> None:
    """Raise UnsupportedEncoding for a compressed body: nothing is inflated here, so nothing can blow up."""
    if encoding is not None and encoding.lower() not in ("", "identity"):
        raise UnsupportedEncoding(f"Send the body without content-encoding; '{encoding}' is not supported.")


async def _read(receive: Receive, *, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise BadRequest(_LEFT)
        chunk = message["body"]
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes * _DISCARD_FACTOR:
            break
        if not message["more_body"]:
            break
    if size > max_bytes:
        raise BodyTooLarge(f"The request body is larger than {max_bytes // 2**20} MB.")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
