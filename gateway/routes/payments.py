"""`POST /webhooks/payments/{provider}`: where a payment provider tells what became of an invoice."""

import asyncio
from typing import Any, Final

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import BadRequest, NoCapacity
from contracts.v1 import billing_pb2 as pb
from gateway.admin.money import Noted
from gateway.bodies import check_encoding, read_body

_SIGNATURES: Final = {"stripe": "stripe-signature"}
_MAX_BYTES: Final = 512 * 1024  # an invoice with all its lines is a tenth of it
_AT_ONCE: Final = 8


def payment_routes(money: Noted, *, body_timeout_s: float) -> list[HTTPRouteHandler]:
    """Return the handler. It needs no key: billing, which has the provider's secret, checks the signature."""
    room = asyncio.Semaphore(_AT_ONCE)

    @post(
        "/webhooks/payments/{provider:str}",
        summary="Take a payment provider's message",
        operation_id="takePaymentEvent",
        tags=["webhooks"],
        status_code=200,
        request_max_body_size=None,  # read_body bounds it
    )
    async def take_event(request: Request[Any, Any, Any], provider: FromPath[str]) -> dict[str, bool]:
        """Record what a signed message says of one of our invoices; again, or of anything else, changes nothing.

        `received` is true for whatever was signed by the provider. Anything but 200 is sent again by it.
        """
        header = _SIGNATURES.get(provider)
        signature = request.headers.get(header, "") if header else ""
        if not signature:
            raise BadRequest("There is no such provider, or the message is not signed.", param="provider")
        if room.locked():  # whoever sends so many is no provider of ours, or will send them again
            raise NoCapacity("Too many messages at once.", retry_after_s=1)
        async with room:
            check_encoding(request.headers.get("content-encoding"))
            body = await read_body(request.receive, max_bytes=_MAX_BYTES, timeout_s=body_timeout_s)
            await money.take_event(pb.ProviderMessage(provider=provider, body=body, signature=signature))
        return {"received": True}

    return [take_event]
