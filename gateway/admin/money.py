"""Writes of money go to billing's Admin service; its address is in Redis."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts import keys
from contracts.credentials import Credentials
from contracts.errors import BadRequest, DependencyDown
from contracts.v1 import billing_pb2 as pb
from contracts.v1 import billing_pb2_grpc
from gateway.audit import record

_TIMEOUT_S: Final = 30.0
_PREVIEW_TIMEOUT_S: Final = 300.0  # reads every usage record of a month
_CALLERS_FAULT: Final = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
    )
)


class Money:
    """Calls billing. Errors: BadRequest with billing's own sentence, DependencyDown."""

    def __init__(self, redis: Redis, *, credentials: Credentials) -> None:
        """`credentials`: with billing's token; without one nothing can be written."""
        self._redis = redis
        self._credentials = credentials

    async def call(self, method: str, request: Any, *, timeout_s: float = _TIMEOUT_S) -> Any:
        """Return billing's answer to one call of contracts/v1/billing.proto."""
        try:
            address: Any = await self._redis.get(keys.BILLING_ADMIN)
        except (RedisError, OSError):
            address = None
        if address is None or not self._credentials.metadata:
            raise DependencyDown("Billing cannot be reached right now.", retry_after_s=5)
        async with self._credentials.channel(address.decode()) as channel:
            stub: Any = billing_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
            ask: Callable[..., Awaitable[Any]] = getattr(stub, method)
            try:
                return await ask(request, timeout=timeout_s, metadata=self._credentials.metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() in _CALLERS_FAULT:
                    raise BadRequest(error.details() or "Billing refused this.") from None
                raise DependencyDown(f"Billing answered {error.code().name}.", retry_after_s=5) from None


class Noted:
    """Writes of money, each noted in the record of changes after billing did it."""

    def __init__(self, engine: AsyncEngine, money: Money) -> None:
        self.engine = engine
        self._money = money

    async def preview(self, asked: pb.PriceProposal) -> pb.PricePreview:
        """Return what a price would change; writes nothing. Raises BadRequest, DependencyDown."""
        answer: pb.PricePreview = await self._money.call("PreviewPrice", asked, timeout_s=_PREVIEW_TIMEOUT_S)
        return answer

    async def take_event(self, message: pb.ProviderMessage) -> None:
        """Pass on what a payment provider says. Raises BadRequest (not the provider's), DependencyDown."""
        await self._money.call("ProviderEvent", message)

    async def call(self, method: str, asked: Any, *, actor: str, subject: str, org: str | None, kind: str) -> Any:
        """Return billing's answer. Raises BadRequest, DependencyDown."""
        answer = await self._money.call(method, asked)
        async with self.engine.begin() as db:
            await record(db, actor=actor, action=_snake(method), kind=kind, subject=subject, org=org)
        return answer


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
