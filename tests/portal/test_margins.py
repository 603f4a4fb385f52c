"""What is left of revenue: seconds of workers that serve many at once, retries, idleness. Worked out by hand."""

import datetime as dt
import time
import uuid

import pytest
import sqlalchemy as sa
from portal_rig import PortalRig

from billing import queries
from billing.partitions import ensure_partitions
from billing.tables import attempt_cost, request
from contracts.identity import at_ms, new_rid
from gateway.portal.roles import Role
from gateway.portal.views.margins import NOBODY, margin_lines

EUR = 1_000_000_000


def line(organisation: str, model: str, phase: str, busy_s: float, retried_s: float = 0.0) -> queries.Worked:
    return queries.Worked(organisation=organisation, model=model, phase=phase, busy_s=busy_s, retried_s=retried_s)


def earned(organisation: str, phase: str, revenue: int) -> queries.Earned:
    return queries.Earned(organisation=organisation, model="m", phase=phase, tokens=1, revenue=revenue)


def test_idle_seconds_are_shared_by_use_and_cost_like_busy_ones() -> None:
    """Ready 7,200 s, busy 1,800: idle 5,400, three quarters of it a's. Two hours of workers cost 4 EUR."""
    lines = margin_lines(
        [earned("a", "decode", 5 * EUR)],
        [line("a", "m", "decode", 1350), line("b", "m", "prefill", 450)],
        {"a": "A"},
        nano_per_hour=2 * EUR,
        ready_s={"m": 7200.0, "empty": 3600.0},
        pool_of=lambda model: model,
    )
    a, b, nobody = sorted(lines, key=lambda one: -one.revenue + (one.organisation == NOBODY))
    assert (a.organisation, a.idle_s, a.cost, a.margin) == ("A", 4050.0, 3 * EUR, 2 * EUR)
    assert a.share == pytest.approx(0.4)
    assert (b.idle_s, b.cost, b.share) == (1350.0, EUR, None)
    assert (nobody.organisation, nobody.model, nobody.cost) == (NOBODY, "empty", 2 * EUR)
    assert sum(one.cost for one in lines) == 6 * EUR  # three worker-hours


def test_without_a_course_nothing_is_idle() -> None:
    (one,) = margin_lines(
        [], [line("a", "m", "decode", 3600)], {}, nano_per_hour=EUR, ready_s={}, pool_of=lambda model: model
    )
    assert (one.idle_s, one.cost) == (0.0, EUR)


async def test_a_workers_time_is_counted_once_however_many_it_serves(portal: PortalRig) -> None:
    """Two decodes of 10 s that overlap by 5 keep a worker busy for 15 s; a unified one prefills for 2 of 8."""
    engine, org, now = portal.rig.gateway.engine, portal.rig.org.id, int(time.time())
    ends = {"d": (now, now + 5), "u": (now,), "p": (now,)}
    async with engine.begin() as db:
        await ensure_partitions(db, dt.datetime.fromtimestamp(now, dt.UTC).date(), days=2)
        await db.execute(sa.text("SET LOCAL session_replication_role = replica"))
        for worker, moments in ends.items():
            for ended_s in moments:
                await add(db, org, worker, ended_s)
        span = queries.Span(start_s=now - 3600, end_s=now + 3600, width_s=3600)
        worked = {one.phase: one for one in await queries.worked_across_tenants(db, span)}
    # decode: 15 s of worker d, 6 of u; prefill: 2 of u, 3 of p, of which p's was an attempt but the last
    assert worked["decode"].busy_s == pytest.approx(21)
    assert (worked["prefill"].busy_s, worked["prefill"].retried_s) == (pytest.approx(5), pytest.approx(3))
    page = (await (await portal.signed_in(Role.OPERATOR)).get("/portal/fleet/margin?range=24h&rate=3600")).text
    assert "26 s" in page.replace("\u00a0", " ")
    assert "known for a day back" not in page
    longer = (await (await portal.signed_in(Role.OPERATOR)).get("/portal/fleet/margin?range=30d&rate=1")).text
    assert "known for a day back" in longer


async def add(db: sa.ext.asyncio.AsyncConnection, org: str, worker: str, ended_s: int) -> None:
    phase, compute_s, worker_s = {"d": ("decode", 10, 12), "u": ("unified", 6, 8), "p": ("prefill", 3, 9)}[worker]
    rid = new_rid(ended_s * 1000 - 20_000)
    at = dt.datetime.fromtimestamp(at_ms(rid) / 1000, dt.UTC)
    known = {"request_id": uuid.UUID(rid), "at": at, "pool": "tiny"}
    await db.execute(
        sa.insert(request).values(
            **known, organisation=org, project="p", key_id="k", model="tiny", tier="default",
            attempts=2 if worker == "p" else 1, batch=False, stream=False, outcome="finished", cause="",
            finish_reason="stop", reasoning_tokens=0, estimated=False, simulated=True, settled_by="gateway",
            billable=True, price_version=1, cost=0, answered_cost=0, prefill_worker="", decode_worker="",
        )
    )  # fmt: skip
    await db.execute(
        sa.insert(attempt_cost).values(
            **known, attempt=1, sample=0, phase=phase, worker=worker, worker_epoch=1, reason="stop", prompt_tokens=1,
            cached_tokens=0, completion_tokens=1, compute_ms=compute_s * 1000.0, worker_ms=worker_s * 1000.0,
            ended_at=dt.datetime.fromtimestamp(ended_s, dt.UTC),
        )
    )  # fmt: skip
