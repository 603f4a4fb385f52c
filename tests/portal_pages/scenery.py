"""What makes every page of the portal worth a look: a week of requests, and money, people and limits around it."""

import time
from collections.abc import Mapping

from browser_rig import Site, fresh_email
from sqlalchemy.ext.asyncio import create_async_engine

from contracts.environment import asyncpg_url
from contracts.v1 import billing_pb2 as pb
from gateway.bounds import Bounds
from gateway.limits import Limits
from gateway.names import Name, NameBook, Target
from gateway.portal.roles import Role
from gateway.tenants import Tenants

_EUR = 1_000_000_000
_DAY_MS = 86_400_000
PROJECTS = (("Website chat", "production"), ("Search", "indexer"), ("Research", "notebooks"))


async def furnished(site: Site) -> Mapping[str, str]:
    """Fill the site's organisation; return the address of every page, by its name in a list of pictures."""
    owners = await _projects(site)
    events = await site.play_week(owners)
    shown = next(one for one in events if one.path is not None and one.path.value == "pd" and one.slo_met)
    org = site.stack.org
    for role in (Role.ADMIN, Role.DEVELOPER, Role.BILLING):
        await site.person(fresh_email(), role)
    await site.billing(
        "Grant", pb.NewGrant(organisation=org, kind="promotional", amount=25 * _EUR, idempotency="welcome", priority=1,
                             expires_ms=int(time.time() * 1000) + 90 * _DAY_MS, note="Welcome credit", by="scenery"),
    )  # fmt: skip
    await site.billing(
        "Grant",
        pb.NewGrant(organisation=org, kind="paid", amount=100 * _EUR, idempotency="first", priority=5, by="scenery"),
    )
    for scope, id_, amount, soft in (("org", org, 40, False), ("project", owners[1][0], 1, True)):
        budget = pb.Budget(organisation=org, scope=scope, scope_id=id_, amount=amount * _EUR // 10, soft=soft, by="x")
        await site.billing("SetBudget", budget)
    month = await site.last_month(owners[0][0], owners[0][1])
    await site.billing("CloseMonth", pb.Month(month=month, organisation=org, issue=True))
    return {
        "overview": "/portal",
        "playground": "/portal/playground",
        "usage": "/portal/usage?by=meter&compare=1",
        "requests": "/portal/requests",
        "request": f"/portal/requests/{shown.rid}",
        "status": "/portal/status",
        "keys": "/portal/keys",
        "limits": "/portal/limits",
        "members": "/portal/members",
        "texts": "/portal/texts",
        "account": "/portal/account",
        "audit": "/portal/audit",
        "budgets": "/portal/budgets",
        "invoices": "/portal/invoices",
        "credits": "/portal/credits",
        "webhooks": "/portal/webhooks",
        "fleet": "/portal/fleet",
        "models": "/portal/fleet/models",
        "targets": "/portal/fleet/targets",
        "tenants": "/portal/fleet/tenants",
        "prices": "/portal/fleet/prices",
        "margin": "/portal/fleet/margin?rate=2.5",
    }


async def _projects(site: Site) -> list[tuple[str, str]]:
    engine = create_async_engine(asyncpg_url(site.stack.database_url))
    tenants, bounds = Tenants(engine), Bounds(engine)
    owners = []
    for name, key in PROJECTS:
        limits = Limits(requests_per_minute=600, tokens_per_minute=400_000, concurrent_requests=32)
        project = await tenants.create_project(site.stack.org, name, actor="Ada")
        made, _ = await tenants.create_key(site.stack.org, project.id, key, limits=limits, actor="Ada")
        owners.append((project.id, made.id))
    known = await tenants.find_organisation(site.stack.org)
    assert known is not None
    await bounds.set_organisation(
        site.stack.org, limits=Limits(concurrent_requests=256, generated_tokens_per_minute=2_000_000), actor="operator"
    )
    await NameBook(engine).put(Name(name="chat", targets=(Target(model="tiny", weight=1),), actor="operator"))
    await engine.dispose()
    return owners
