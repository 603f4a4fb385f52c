"""Where Stripe's messages arrive: from the gateway's open route to a paid invoice."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from portal_rig import PortalRig

from billing import invoices
from billing.admin import Admin, admin_server
from billing.budgets import Budgets
from billing.collection import Collector
from billing.consumer import UsageSink
from billing.invoice_book import Invoice, State, find_invoice
from billing.partitions import Partitions, ensure_partitions
from billing.periods import month_before
from billing.prices import list_prices
from billing.stripe_payments import Stripe, stripe_client
from contracts import keys
from contracts.credentials import Credentials
from contracts.identity import new_rid
from contracts.rating import Tokens, cost
from contracts.usage import Outcome, UsageEvent
from contracts.wire import encode
from tests.billing.stripe_server import API_KEY, WEBHOOK_SECRET, StripeServer, running_stripe, signed

TOKEN = "billing-token"
PATH = "/webhooks/payments/stripe"
NOW = dt.datetime.now(dt.UTC)
MONTH = month_before(NOW)


@pytest.fixture
async def stripe_server() -> AsyncIterator[StripeServer]:
    async with running_stripe() as server:
        server.declines = 1
        yield server


@pytest.fixture
async def declined(portal: PortalRig, stripe_server: StripeServer) -> AsyncIterator[Invoice]:
    """An invoice whose first try to be paid failed; billing serves beside it."""
    engine = portal.rig.gateway.engine
    client = stripe_client(API_KEY, api_base=stripe_server.url)
    collector = Collector(
        engine, Stripe(client, webhook_secrets=[WEBHOOK_SECRET]), now_ms=lambda: int(NOW.timestamp() * 1000)
    )  # fmt: skip
    admin = Admin(engine, Budgets(engine, portal.rig.gateway.redis), currency="EUR", collector=collector)
    await _use(portal, Tokens(decode=7_500_000))  # 3.00
    async with engine.begin() as conn:
        made = await invoices.close_period(conn, portal.rig.org.id, MONTH, currency="EUR", now=NOW + dt.timedelta(1))
        issued = await invoices.issue(conn, portal.rig.org.id, made.id, now=NOW)
    await collector.settle(portal.rig.org.id, issued.id)
    portal.rig.gateway.admin.money._money._credentials = Credentials(token=TOKEN)
    async with admin_server(admin, listen="127.0.0.1:0", token=TOKEN) as address:
        await portal.rig.redis.set(keys.BILLING_ADMIN, address)
        yield issued


async def _use(portal: PortalRig, tokens: Tokens) -> None:
    engine = portal.rig.gateway.engine
    at = MONTH.end - dt.timedelta(hours=1)
    async with engine.begin() as conn:
        await ensure_partitions(conn, at.date(), 1)
        price = next(one.price for one in await list_prices(conn, "tiny"))
    event = UsageEvent(
        rid=new_rid(int(at.timestamp() * 1000)), org=portal.rig.org.id, project=portal.rig.project.id,
        key_id=portal.rig.key.id, model="tiny", pool="tiny", tier="default", outcome=Outcome.FINISHED, price=price,
        tokens=tokens, cost=cost(tokens, price),
    )  # fmt: skip
    sink = UsageSink(engine, Partitions(engine))
    await sink.write(await sink.prepare([encode(event)]))


async def _post(portal: PortalRig, body: bytes, signature: str = "", path: str = PATH) -> httpx.Response:
    headers: dict[str, Any] = {"content-type": "application/json"} | (
        {"stripe-signature": signature} if signature else {}
    )
    return await portal.browser().client.post(path, content=body, headers=headers)


async def _state(portal: PortalRig, about: Invoice) -> State:
    async with portal.rig.gateway.engine.begin() as conn:
        found = await find_invoice(conn, portal.rig.org.id, about.id)
    assert found is not None
    return found.state


async def test_a_signed_message_pays_the_invoice_once_however_often_it_comes(
    portal: PortalRig, stripe_server: StripeServer, declined: Invoice
) -> None:
    assert await _state(portal, declined) is State.ISSUED
    body = stripe_server.event("invoice.paid", stripe_server.charge(stripe_server.invoices["in_0"]))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(_post(portal, body, signed(body))) for _ in range(3)]
    answers = [task.result() for task in sent]
    assert [(one.status_code, one.json()) for one in answers] == [(200, {"received": True})] * 3
    assert await _state(portal, declined) is State.PAID
    unknown = stripe_server.event("customer.updated", {"id": "cus_0"})
    assert (await _post(portal, unknown, signed(unknown))).status_code == 200


async def test_what_is_not_signed_by_the_provider_is_refused_and_changes_nothing(
    portal: PortalRig, stripe_server: StripeServer, declined: Invoice
) -> None:
    paid = stripe_server.event("invoice.paid", stripe_server.invoices["in_0"], status="paid", amount_paid=300)
    for body, signature, path, status in (
        (paid, signed(paid, secret="whsec_guessed"), PATH, 400),
        (paid, "", PATH, 400),
        (paid, signed(paid), "/webhooks/payments/elsewhere", 400),
        (b"x" * 600_000, signed(b""), PATH, 413),
    ):
        answer = await _post(portal, body, signature, path)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    assert await _state(portal, declined) is State.ISSUED


async def test_a_tenant_sees_where_it_can_pay_a_declined_invoice(
    portal: PortalRig, stripe_server: StripeServer, declined: Invoice
) -> None:
    _, secret = await portal.rig.tenants.create_key(portal.rig.org.id, portal.rig.project.id, "a", is_admin=True)
    answer = await portal.browser().client.get(
        f"/admin/v1/organisations/{portal.rig.org.id}/invoices/{declined.id}",
        headers={"authorization": f"Bearer {secret}"},
    )
    about = answer.json()["value"]["collection"]
    assert (about["state"], about["reason"], about["url"]) == (
        "declined", "card_declined", "https://pay.example/in_0"
    )  # fmt: skip
