"""The admin API: budgets, credits and prices, and what is noted of them."""

import datetime as dt

import httpx
from admin_rig import here
from portal_rig import PortalRig

from billing.consumer import UsageSink
from billing.moments import moment
from billing.partitions import Partitions, ensure_partitions
from billing.prices import list_prices
from contracts.identity import new_rid
from contracts.rating import Tokens, cost
from contracts.usage import Outcome, UsageEvent
from contracts.wire import encode
from gateway.portal.roles import Role


async def test_what_forms_of_the_portal_write_about_money_is_in_the_record_of_changes(
    portal: PortalRig, admin: httpx.AsyncClient, billing: None
) -> None:
    payer = await portal.signed_in(Role.BILLING)
    scope = {"scope": f"project:{portal.rig.project.id}"}
    foreign = {"scope": "project:proj_of_another"}
    assert (await payer.post("/portal/budgets", {**scope, "amount": "12.50"})).status_code == 303
    assert (await payer.post("/portal/budgets/remove", foreign, form="/portal/budgets")).status_code == 404
    assert (await payer.post("/portal/budgets/remove", scope, form="/portal/budgets")).status_code == 303
    hook = {"address": "https://example.org/hook", "secret": "s" * 32}
    assert (await payer.post("/portal/webhooks", hook)).status_code == 303
    found = (await admin.get(f"{here(portal)}/audit")).json()["data"]
    written = [(one["action"], one["subject"]) for one in found if one["kind"] in ("budget", "profile")]
    project = scope["scope"]
    assert written[::-1] == [
        ("set_budget", project),
        ("remove_budget", project),
        ("set_profile", portal.rig.org.id),
    ]
    assert all(one["actor"].startswith("person_") for one in found if one["kind"] in ("budget", "profile"))


async def test_budgets_credits_and_prices_are_written_by_billing_and_read_back(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient, billing: None
) -> None:
    budget = f"{here(portal)}/budgets/project/{portal.rig.project.id}"
    assert (await admin.put(budget, json={"amount": "12.50"})).status_code == 200
    found = (await admin.get(f"{here(portal)}/budgets")).json()["data"]
    assert [(one["scope"], one["amount_nano"], one["thresholds"]) for one in found] == [
        ("project", 12_500_000_000, [50, 80, 100])
    ]
    assert (await admin.delete(budget)).json()["deleted"]
    gift = {"amount": "5", "idempotency": "welcome"}
    assert (await admin.post(f"{here(portal)}/credits", json=gift)).status_code == 403
    first = await operator.post(f"{here(portal)}/credits", json=gift)
    again = await operator.post(f"{here(portal)}/credits", json=gift)
    assert first.status_code == 201, first.text
    assert first.json()["id"] == again.json()["id"]
    credit = (await admin.get(f"{here(portal)}/credits")).json()["data"]
    assert [one["value"]["left"] for one in credit] == [5_000_000_000]
    price = {"model": "tiny", "prefill_computed": "1", "prefill_cached": "0.5", "decode": "2"}
    made = await operator.post("/admin/v1/prices", json=price)
    assert made.status_code == 201, made.text
    assert made.json()["value"]["version"] == 2
    listed = (await operator.get("/admin/v1/prices", params={"model": "tiny"})).json()["data"]
    assert {one["value"]["price"]["version"] for one in listed} == {1, 2}
    refused = await operator.post(f"{here(portal)}/invoices", json={"month": "2999-01"})
    assert refused.status_code == 400


async def test_a_price_is_previewed_on_past_usage_and_not_set(
    portal: PortalRig, operator: httpx.AsyncClient, admin: httpx.AsyncClient, billing: None
) -> None:
    body = {"model": "tiny", "prefill_computed": "0.1", "prefill_cached": "0.02", "decode": "0.8", "batch_ppm": 500000}
    assert (await admin.post("/admin/v1/prices/preview", json=body)).status_code == 403
    await use_up(portal, Tokens(decode=1_000_000))
    now = dt.datetime.now(dt.UTC)
    span = {"used_from": (now - dt.timedelta(days=1)).isoformat(), "used_to": (now + dt.timedelta(days=1)).isoformat()}
    answer = await operator.post("/admin/v1/prices/preview", json=body | span)
    assert answer.status_code == 200, answer.text
    seen = answer.json()
    assert (seen["object"], seen["difference"], seen["difference_nano"]) == ("price_preview", "0.4", 400_000_000)
    (change,) = seen["changes"]
    assert (change["organisation_id"], change["meter"]) == (portal.rig.org.id, "decode")
    assert (change["old"], change["new"], change["requests"]) == ("0.4", "0.8", 1)
    last_month = (await operator.post("/admin/v1/prices/preview", json=body)).json()
    assert dt.datetime.fromisoformat(last_month["used_to"]) == now.replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    listed = (await operator.get("/admin/v1/prices", params={"model": "tiny"})).json()["data"]
    assert len(listed) == 1, "nothing was set"
    wrong = await operator.post("/admin/v1/prices/preview", json=body | {"model": "nothing"})
    assert wrong.status_code == 400
    assert "has no price" in wrong.json()["error"]["message"]


async def use_up(portal: PortalRig, tokens: Tokens) -> None:
    """Bill one request of the portal's organisation, a minute ago."""
    engine = portal.rig.gateway.engine
    at_ms = int(dt.datetime.now(dt.UTC).timestamp() * 1000) - 60_000
    async with engine.begin() as conn:
        await ensure_partitions(conn, moment(at_ms).date(), 2)
        price = next(one.price for one in await list_prices(conn, "tiny"))
    event = UsageEvent(
        rid=new_rid(at_ms), org=portal.rig.org.id, project=portal.rig.project.id, key_id=portal.rig.key.id,
        model="tiny", pool="tiny", tier="default", outcome=Outcome.FINISHED, price=price, tokens=tokens,
        cost=cost(tokens, price),
    )  # fmt: skip
    sink = UsageSink(engine, Partitions(engine))
    await sink.write(await sink.prepare([encode(event)]))
