"""How the command line calls billing's Admin service: its address is in Redis, the token in the stack's file."""

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeVar

import grpc
import typer

from contracts import keys
from contracts.catalog import NANO_PER_UNIT
from contracts.v1 import billing_pb2_grpc
from pdgate.connection import billing_credentials, open_redis
from pdgate.preflight import CannotStart

T = TypeVar("T")

_TIMEOUT_S: Final = 30.0


def call(method: str, request: Any, *, timeout_s: float = _TIMEOUT_S) -> Any:
    """Call billing; a refusal ends the command with its sentence. Raises CannotStart when billing is away."""
    return asyncio.run(_call(method, request, timeout_s))


async def _call(method: str, request: Any, timeout_s: float) -> Any:
    async with open_redis() as redis:
        address: Any = await redis.get(keys.BILLING_ADMIN)
    if address is None:
        raise CannotStart("billing's Admin service does not run: is BILLING_ADMIN_TOKEN set, and billing up?")
    credentials = billing_credentials()
    async with credentials.channel(address.decode()) as channel:
        stub: Any = billing_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        ask: Callable[..., Awaitable[Any]] = getattr(stub, method)
        try:
            return await ask(request, timeout=timeout_s, metadata=credentials.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise typer.BadParameter(error.details() or "") from None
            raise CannotStart(f"billing answered {error.code().name}: {error.details()}") from None


def who() -> str:
    """Return who is noted as the author of a change."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def nano_of(text: str, *, decimals: int = 9) -> int:
    """Return currency units as nano-units. Raises BadParameter when they are not exact."""
    try:
        amount = Decimal(text) * NANO_PER_UNIT
    except InvalidOperation:
        raise typer.BadParameter(f"{text!r} is not an amount of money") from None
    step = 10 ** (9 - decimals)
    if amount != amount.to_integral_value() or int(amount) % step:
        raise typer.BadParameter(f"{text!r} has more than {decimals} decimals")
    return int(amount)


def cents_of(text: str) -> int:
    """Return currency units as cents. Raises BadParameter when they are not exact."""
    return nano_of(text, decimals=2) // 10_000_000


def ppm_of(text: str) -> int:
    """Return `99.5%` or `0.995` as millionths. Raises BadParameter for anything else."""
    try:
        share = Decimal(text.rstrip("%")) / (100 if text.endswith("%") else 1) * 1_000_000
    except InvalidOperation:
        raise typer.BadParameter(f"{text!r} is not a share: write 99.5% or 0.995") from None
    if not 0 <= share <= 1_000_000 or share != share.to_integral_value():
        raise typer.BadParameter(f"{text!r} must be 0 to 100 %, with at most four decimals")
    return int(share)
