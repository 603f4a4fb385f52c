"""A public name that stands for two models: who agrees to it is served by the small one where that helps."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from gateway_rig import HELLO, POOL, Rig, eventually, running_rig

from contracts.catalog import CatalogError, read_catalog
from contracts.series import Point, add_command
from contracts.wire import Submit
from gateway.scopes import Scopes, local_consent
from tests.conftest import CATALOG

ROUTES = (
    CATALOG
    + """
[models.mini]
pool = "tiny"
tokenizer = "tiny"
context_tokens = 2048
[models.mini.price]
prefill_computed = "0.01"
prefill_cached = "0.01"
decode = "0.01"
[routes.assistant]
primary = "tiny"
local = "mini"
local_share = 0.2
[routes.short]
primary = "tiny"
local = "mini"
local_up_to_tokens = 100
"""
)


@pytest.fixture
async def routed(redis_url, database_url, models_dir, tmp_path) -> AsyncIterator[Rig]:
    file = tmp_path / "routes.toml"
    file.write_text(ROUTES)
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=file,
        catalog=read_catalog(file),
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
    ) as rig:
        await eventually(lambda: not rig.gateway.models.missing("mini"))
        yield rig


async def submitted(rig: Rig, body: dict) -> Submit:
    """Return what the scheduler gets of a request, and end it."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.client.post("/v1/chat/completions", json=body))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "enough seen")
    return submit


async def test_a_share_of_requests_goes_to_the_local_model_and_is_priced_as_that(routed: Rig):
    models = routed.gateway.models
    models._draw = lambda: 0.1
    local = await submitted(routed, {**HELLO, "model": "assistant"})
    assert (local.owner.model, local.local) == ("mini", True)
    assert local.owner.price.decode < routed.gateway.prices.list_prices["tiny"].decode
    models._draw = lambda: 0.3
    primary = await submitted(routed, {**HELLO, "model": "assistant"})
    assert (primary.owner.model, primary.local) == ("tiny", False)


async def test_short_prompts_go_to_the_local_model(routed: Rig):
    routed.gateway.models._draw = lambda: 0.9
    long = {"model": "short", "messages": [{"role": "user", "content": "word " * 200}]}
    assert (await submitted(routed, {**HELLO, "model": "short"})).owner.model == "mini"
    assert (await submitted(routed, long)).owner.model == "tiny"


async def test_a_degraded_pool_sends_those_who_agreed_to_the_local_model_and_nobody_else(routed: Rig):
    models = routed.gateway.models
    models._draw = lambda: 0.9
    assert (await submitted(routed, {**HELLO, "model": "assistant"})).owner.model == "tiny"
    point = Point(
        at_unix_ms=0, prefill=0, decode=1, unified=0, target="", why="", mode="auto", rung="local", met=0, missed=0,
        structural=0, refused=0, by_stage={}, num_waiting=0, oldest_wait_s=0.0, queued_prefill_tokens=0,
        decode_use=0.0, num_running=0,
    )  # fmt: skip
    await routed.redis.execute_command(*add_command(POOL, point))
    await eventually(lambda: routed.gateway.fleet.degraded(POOL))
    assert (await submitted(routed, {**HELLO, "model": "assistant"})).owner.model == "mini"
    assert (await submitted(routed, HELLO)).owner.model == "tiny"


async def test_scopes_may_forbid_a_local_model_or_agree_to_it_for_the_primarys_name(routed: Rig):
    models = routed.gateway.models
    models._draw = lambda: 0.0
    assert models.servable("assistant").local
    assert not models.servable("assistant", local=False).local
    assert models.servable("assistant", local=False).name == "tiny"
    assert models.servable("tiny", local=True).name == "tiny"  # the primary is well
    models._down = lambda public: public == "tiny"
    assert models.servable("tiny", local=True).name == "mini"
    assert models.servable("tiny").name == "tiny"


def test_a_project_that_forbids_local_models_binds_its_keys():
    yes, no = Scopes(local_models=True), Scopes(local_models=False)
    assert local_consent((Scopes(), Scopes())) is None
    assert local_consent((yes, Scopes())) is True
    assert local_consent((yes, no)) is False


async def test_routes_are_listed_with_their_two_models(routed: Rig):
    listed = {row["id"]: row for row in (await routed.client.get("/v1/models")).json()["data"]}
    assert set(listed) == {"tiny", "mini", "assistant", "short"}
    assert listed["assistant"]["route"] == ["tiny", "mini"]
    assert listed["tiny"]["route"] == []
    assert (await routed.client.get("/v1/models/short")).json()["route"] == ["tiny", "mini"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ('[routes.x]\nprimary = "tiny"\nlocal = "none"\n', "needs the model 'none'"),
        ('[routes.tiny]\nprimary = "tiny"\nlocal = "mini"\n', "a route"),
        ('[routes.x]\nprimary = "tiny"\nlocal = "mini"\nlocal_share = 2\n', "local_share"),
    ],
)
def test_a_route_that_cannot_be_is_refused_by_name(tmp_path, extra, said):
    file = tmp_path / "models.toml"
    file.write_text(ROUTES + extra)
    with pytest.raises(CatalogError, match=said):
        read_catalog(file)
