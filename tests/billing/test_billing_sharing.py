"""Share groups: in force by consent of at least two, seen by the gateway, priced apart, and on record."""

import pytest
import sqlalchemy as sa
from billing_rig import TINY, usage_event

from billing.queries import share_group
from billing.sharing import SharingError, consents_of, create_group, members_of_across_tenants, say
from contracts.rating import CacheScope, Tokens
from contracts.settlement import usage_event_of
from contracts.slo import SloTarget
from contracts.usage import Outcome
from contracts.wire import Owner


async def begin(rig, call, *words, **names):
    async with rig.engine.begin() as conn:
        return await call(conn, *words, **names)


async def group_of(rig, organisation):
    async with rig.engine.begin() as conn:
        return await conn.scalar(sa.select(share_group(organisation)))


async def test_a_group_is_in_force_once_two_consent_and_no_more_when_one_leaves(rig):
    group = await begin(rig, create_group, name="labs", by="ann")
    assert await group_of(rig, "org_a") == ""
    await begin(rig, say, "org_a", group, consents=True, by="ann")
    assert await group_of(rig, "org_a") == "", "alone"
    await begin(rig, say, "org_b", group, consents=True, by="bob")
    assert await group_of(rig, "org_a") == await group_of(rig, "org_b") == group
    assert await group_of(rig, "org_c") == ""
    await begin(rig, say, "org_b", group, consents=False, by="bob")
    assert await group_of(rig, "org_a") == await group_of(rig, "org_b") == ""
    words = await begin(rig, members_of_across_tenants, group)
    assert [(one.organisation, one.consents, one.by) for one in words] == [
        ("org_a", True, "ann"),
        ("org_b", False, "bob"),
    ]
    assert await rig.scalar("SELECT count(*) FROM billing.share_consent") == 3, "every word stays on record"


async def test_an_organisation_is_in_one_group_at_a_time(rig):
    first, second = [await begin(rig, create_group, name=name, by="ann") for name in "xy"]
    await begin(rig, say, "org_a", first, consents=True, by="ann")
    with pytest.raises(SharingError, match="leave it first"):
        await begin(rig, say, "org_a", second, consents=True, by="ann")
    with pytest.raises(SharingError, match="no share group"):
        await begin(rig, say, "org_a", "share_none", consents=True, by="ann")
    assert [one.group_id for one in await begin(rig, consents_of, "org_a")] == [first]


async def test_cached_tokens_of_a_group_are_metered_with_the_scope_shared(rig):
    owner = Owner(
        org="org_a", project="p", key_id="k", model="tiny", tier="default", price=TINY, slo=SloTarget(),
        share_group="share_1",
    )  # fmt: skip
    tokens = Tokens(prefill_computed=10, prefill_cached=90, decode=5)
    event = usage_event_of(
        owner, rid=usage_event().rid, pool="tiny", outcome=Outcome.FINISHED, tokens=tokens, attempts=1
    )
    assert event.cache_scope is CacheScope.SHARED
    await rig.bill(event)
    rows = await rig.rows("SELECT meter, scope FROM billing.usage_record ORDER BY meter")
    assert [tuple(row) for row in rows] == [
        ("prefill_computed", "own"),
        ("prefill_cached", "shared"),
        ("decode", "own"),
    ]
    assert await rig.scalar("SELECT count(*) FROM billing.usage_hourly WHERE scope = 'shared'") == 1
