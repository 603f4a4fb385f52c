"""Names of models that operators give: aliases, shares by weight, and the dates of an end."""

import asyncio
import datetime as dt
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from gateway_rig import HELLO, Rig, eventually, running_rig

from contracts.catalog import read_catalog
from contracts.errors import BadRequest
from contracts.lifecycle import FinishReason, Phase
from contracts.wire import Change
from gateway.changes import announce
from gateway.names import Name, NameBook, Names, Target, Withdrawn, checked, notices
from gateway.tenants import publish_key_state
from tests.conftest import CATALOG

TWO_MODELS = (
    CATALOG
    + """
[models.next]
pool = "tiny"
tokenizer = "tiny"
context_tokens = 2048
[models.next.price]
prefill_computed = "0.01"
prefill_cached = "0.01"
decode = "0.01"
[models.absent]
tokenizer = "not-there"
context_tokens = 2048
[models.absent.price]
prefill_computed = "0.01"
prefill_cached = "0.01"
decode = "0.01"
"""
)
NAMES = "/admin/v1/model-names"


@pytest.fixture
async def named(redis_url, database_url, models_dir, tmp_path) -> AsyncIterator[Rig]:
    file = tmp_path / "models.toml"
    file.write_text(TWO_MODELS)
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=file,
        catalog=read_catalog(file),
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
    ) as rig:
        await eventually(lambda: not rig.gateway.models.missing("next"))
        yield rig


async def operator(rig: Rig) -> dict[str, str]:
    org = await rig.tenants.create_organisation("Operators", runs_fleet=True)
    project = await rig.tenants.create_project(org.id, "Default")
    key, secret = await rig.tenants.create_key(org.id, project.id, "admin", is_admin=True)
    await publish_key_state(rig.redis, key)
    return {"authorization": f"Bearer {secret}"}


async def ask(rig: Rig, model: str, *, session: str = ""):
    """Ask a name, and answer by hand. Returns the answer."""
    async with asyncio.TaskGroup() as tasks:
        headers = {"x-session-id": session} if session else {}
        body = {**HELLO, "model": model, "max_tokens": 1}
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=body, headers=headers))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        whole = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await whole.tokens("Hi")
        await whole.finish(FinishReason.LENGTH, prompt=10, completion=1)
    return asked.result()


def shared(*weights: int) -> Name:
    return Name(name="n", targets=tuple(Target(model=f"m{i}", weight=w) for i, w in enumerate(weights)))


def test_a_name_is_shared_by_weight_and_a_session_moves_only_to_what_grows() -> None:
    names, sessions = Names(), [f"s{i}" for i in range(20_000)]
    before = {one: names.choose(shared(95, 5), one, lambda _: True) for one in sessions}
    assert 0.045 < Counter(before.values())["m1"] / len(sessions) < 0.055  # 5 %, three standard errors
    assert before == {one: names.choose(shared(95, 5), one, lambda _: True) for one in sessions}
    after = {one: names.choose(shared(80, 20), one, lambda _: True) for one in sessions}
    assert not [one for one in sessions if before[one] == "m1" != after[one]]
    assert {names.choose(shared(95, 5), one, lambda model: model == "m1") for one in sessions} == {"m1"}


def test_an_end_is_told_in_headers_and_then_kept() -> None:
    end = Name(
        name="old",
        deprecated_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        sunset_at=dt.datetime(2026, 6, 30, 23, 59, 59, tzinfo=dt.UTC),
        replacement="new",
    )
    assert notices(end) == {
        "deprecation": "@1767225600",
        "sunset": "Tue, 30 Jun 2026 23:59:59 GMT",
        "link": '</v1/models/new>; rel="successor-version"',
    }
    assert end.sunset_at is not None
    sunset_s = end.sunset_at.timestamp()
    Names(lambda: sunset_s - 1).check(end)
    with pytest.raises(Withdrawn, match=r"withdrawn on 2026-06-30\. Use 'new'"):
        Names(lambda: sunset_s).check(end)


@pytest.mark.parametrize(
    "wanted",
    [
        Name(name="nothing"),
        Name(name="x", targets=(Target(model="unheard-of"),)),
        Name(name="x", targets=(Target(model="tiny"), Target(model="tiny"))),
        Name(name="tiny", sunset_at=dt.datetime(2026, 1, 1)),  # noqa: DTZ001 - what is tested
    ],
    ids=["no target", "unknown target", "a target twice", "no zone"],
)
def test_a_name_that_means_nothing_is_not_kept(tmp_path, wanted: Name) -> None:
    file = tmp_path / "models.toml"
    file.write_text(TWO_MODELS)
    with pytest.raises(BadRequest):
        checked(wanted, read_catalog(file))


async def test_operators_give_names_and_answers_name_the_model_that_made_them(named: Rig) -> None:
    admin = await operator(named)
    assert (await named.client.post("/v1/chat/completions", json={**HELLO, "model": "stable"})).status_code == 404
    put = await named.client.put(f"{NAMES}/stable", json={"targets": [{"model": "next"}]}, headers=admin)
    assert put.status_code == 200, put.text
    answer = await ask(named, "stable")
    assert answer.json()["model"] == "next"
    assert "deprecation" not in answer.headers
    listed = {one["id"]: one for one in (await named.client.get("/v1/models")).json()["data"]}
    assert listed["stable"]["targets"] == ["next"]
    refused = await named.client.put(f"{NAMES}/x", json={"targets": [{"model": "absent"}]}, headers=admin)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "target_not_ready")
    both = [{"model": "absent", "weight": 99}, {"model": "tiny"}]
    kept = await named.client.put(f"{NAMES}/x", json={"targets": both, "unready": True}, headers=admin)
    assert kept.status_code == 200
    assert (await ask(named, "x", session="a")).json()["model"] == "tiny"  # what could not serve is passed over
    assert [one["name"] for one in (await named.client.get(NAMES, headers=admin)).json()["data"]] == ["stable", "x"]
    assert (await named.client.put(f"{NAMES}/y", json={"targets": []}, headers=admin)).status_code == 400
    assert (await named.client.put(f"{NAMES}/y", json={})).status_code == 403  # a key of a tenant
    assert (await named.client.delete(f"{NAMES}/x", headers=admin)).json()["deleted"] is True
    assert (await named.client.post("/v1/chat/completions", json={**HELLO, "model": "x"})).status_code == 404
    audit = await named.client.get("/admin/v1/audit", params={"kind": "name"}, headers=admin)
    assert [one["action"] for one in audit.json()["data"]] == ["unnamed", "named", "named"]


async def test_a_deprecated_model_says_so_and_is_refused_after_its_sunset_by_alias_too(named: Rig) -> None:
    book = NameBook(named.gateway.engine)
    now = dt.datetime.now(dt.UTC)
    later = Name(name="tiny", deprecated_at=now, sunset_at=now + dt.timedelta(days=30), replacement="next")
    await book.put(later)
    await announce(named.redis, Change(kind="name", id="tiny", state=""))  # as `pdgate models alias` does
    await eventually(lambda: named.gateway.models.names.find("tiny"))
    answer = await ask(named, "tiny")
    assert answer.headers["deprecation"] == f"@{int(now.timestamp())}"
    assert answer.headers["link"] == '</v1/models/next>; rel="successor-version"'
    shown = (await named.client.get("/v1/models/tiny")).json()
    assert (shown["deprecated_at"], shown["replacement"]) == (int(now.timestamp()), "next")
    await book.put(Name(name="tiny", sunset_at=now, replacement="next"))
    await announce(named.redis, Change(kind="name", id="tiny", state=""))

    async def refused() -> bool:
        gone = await named.client.post("/v1/chat/completions", json={**HELLO, "stream": True, "model": "tiny"})
        return gone.status_code == 404 and gone.json()["error"]["code"] == "model_withdrawn"

    await eventually(lambda: named.gateway.models.names.find("tiny").sunset_at == now)
    assert await refused()
