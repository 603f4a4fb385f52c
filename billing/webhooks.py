"""Webhooks: queued in the transaction that they tell of, signed, tried again with growing pauses, sent by one process.

A receiver checks `pdgate-signature: t=UNIX_SECONDS,v1=HEX`, where HEX is HMAC-SHA256 of `UNIX_SECONDS.BODY` under its
secret, and drops a `pdgate-webhook-id` that it has seen: delivery is at least once.
"""

import hashlib
import hmac
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

import httpx
import msgspec
import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import money_tables as m
from billing.moments import moment
from billing.profiles import find_profile

log: Final = structlog.get_logger()

MAX_TRIES: Final = 12  # the last after about a day and a half
_FIRST_PAUSE_S: Final = 30.0
_TIMEOUT_S: Final = 10.0
_BATCH: Final = 20


def signature(secret: str, body: str, at_s: int) -> str:
    """Return the value of `pdgate-signature`."""
    mac = hmac.new(secret.encode(), f"{at_s}.{body}".encode(), hashlib.sha256).hexdigest()
    return f"t={at_s},v1={mac}"


def pause_s(tries: int) -> float:
    """Return how long to wait after so many failures, seconds: doubling from 30 s."""
    return float(_FIRST_PAUSE_S * 2 ** max(0, tries - 1))


async def enqueue(conn: AsyncConnection, tenant: str, *, url: str, event: str, data: msgspec.Struct) -> uuid.UUID:
    """Queue a webhook; the caller commits it together with what it tells of."""
    webhook_id = uuid.uuid4()
    body = msgspec.json.encode({"id": str(webhook_id), "type": event, "data": data}).decode()
    await conn.execute(m.webhook.insert().values(id=webhook_id, organisation=tenant, url=url, body=body))
    return webhook_id


class Webhooks:
    """Sends what is due. Any number may run: each takes rows that no other holds."""

    def __init__(self, engine: AsyncEngine, client: httpx.AsyncClient, *, now_ms: Callable[[], int]) -> None:
        self._engine = engine
        self._client = client
        self._now_ms = now_ms

    async def send_due(self) -> int:
        """Send a batch of what is due; return how many arrived."""
        w = m.webhook.c
        due = (
            sa.select(m.webhook)
            .where(w.delivered_at.is_(None), w.given_up_at.is_(None), w.next_at <= self._now())
            .order_by(w.next_at)
            .limit(_BATCH)
            .with_for_update(skip_locked=True)
        )
        arrived = 0
        async with self._engine.begin() as conn:
            for row in (await conn.execute(due)).all():
                arrived += await self._send(conn, row)
        return arrived

    async def _send(self, conn: AsyncConnection, row: Any) -> bool:
        secret = (await find_profile(conn, row.organisation)).webhook_secret
        headers = {
            "content-type": "application/json",
            "pdgate-webhook-id": str(row.id),
            "pdgate-signature": signature(secret, row.body, self._now_ms() // 1000),
        }
        try:
            answer = await self._client.post(row.url, content=row.body, headers=headers, timeout=_TIMEOUT_S)
            error = "" if answer.is_success else f"HTTP {answer.status_code}"
        except httpx.HTTPError as fault:
            error = f"{type(fault).__name__}: {fault}"
        tries = row.tries + 1
        changes: dict[str, Any] = {"tries": tries, "last_error": error[:500]}
        if not error:
            changes["delivered_at"] = self._now()
        elif tries >= MAX_TRIES:
            changes["given_up_at"] = self._now()
            log.error("webhook_given_up", organisation=row.organisation, webhook=str(row.id), error=error)
        else:
            changes["next_at"] = self._now() + timedelta(seconds=pause_s(tries))
        await conn.execute(sa.update(m.webhook).where(m.webhook.c.id == row.id).values(changes))
        return not error

    def _now(self) -> datetime:
        return moment(self._now_ms())
