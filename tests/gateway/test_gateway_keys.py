"""Keys: what they may be used for, how they change, and how soon every gateway knows."""

import asyncio
import contextlib
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from gateway_rig import HELLO, Rig, events_of, eventually, running_rig

from contracts.errors import ModelNotFound, PermissionDenied
from contracts.lifecycle import FinishReason, Phase
from contracts.usage import Outcome
from gateway.bounds import Bounds
from gateway.changes import Announcer, HoldBook
from gateway.holds import READ_ONLY, SUSPENDED, Hold
from gateway.ids import hash_key
from gateway.limits import Limits
from gateway.scopes import (
    Scopes,
    WrongNetwork,
    allows_model,
    check_call,
    check_model,
    check_scopes,
    check_tier,
    client_address,
    forwarded,
)
from gateway.tables import change
from gateway.tenants import KeyKnown, publish_key_state

NO_MODEL = {**HELLO, "model": "none"}


async def post(rig: Rig, body: object = HELLO, **headers: str):
    return await rig.client.post("/v1/chat/completions", content=json.dumps(body), headers=headers)


def code_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def announcer(rig: Rig) -> Announcer:
    return Announcer(rig.gateway.engine, rig.redis)


@pytest.fixture
async def other(rig: Rig, redis_url, database_url, catalog_file, catalog, models_dir, tmp_path: Path):
    """A second gateway of the same installation; its own tenant is not used."""
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        catalog=catalog,
        models_dir=models_dir,
        journal_dir=tmp_path / "other",
    ) as second:
        second.client.headers["authorization"] = f"Bearer {rig.secret}"
        yield second


# -- scopes ----------------------------------------------------------------------------------------


def test_a_scope_names_paths_and_what_is_below_them():
    bounds = [Scopes(endpoints=("/v1/chat/completions", "/v1/files"))]
    check_call(bounds, endpoint="/v1/chat/completions", address="")
    check_call(bounds, endpoint="/v1/files/file-1", address="")
    for other_path in ("/v1/completions", "/v1/filesystem", "/v1/chat"):
        with pytest.raises(PermissionDenied):
            check_call(bounds, endpoint=other_path, address="")


def test_key_and_project_bind_both():
    bounds = (Scopes(models=("a", "b"), tiers=("batch",)), Scopes(models=("b", "c")))
    assert [allows_model(bounds, name) for name in "abc"] == [False, True, False]
    with pytest.raises(ModelNotFound):
        check_model(bounds, "a")
    check_tier(bounds, "default")
    check_tier(bounds, "batch")
    with pytest.raises(PermissionDenied):
        check_tier(bounds, "priority")


def test_a_network_may_be_of_either_version_and_a_unix_socket_is_in_none():
    bounds = [Scopes(networks=("10.0.0.0/8", "2001:db8::/32"))]
    for inside in ("10.1.2.3", "2001:db8::1", "::ffff:10.9.9.9"):
        check_call(bounds, endpoint="/", address=inside)
    for outside in ("11.0.0.1", "2001:db9::1", ""):
        with pytest.raises(PermissionDenied):
            check_call(bounds, endpoint="/", address=outside)
    with pytest.raises(WrongNetwork):
        check_scopes(Scopes(networks=("10.0.0.1/8",)))


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "trusted", "caller"),
    [
        ("9.9.9.9", "10.0.0.1", (), "9.9.9.9"),  # nobody's word is taken
        ("10.0.0.1", "1.2.3.4", ("10.0.0.0/8",), "1.2.3.4"),
        ("10.0.0.1", "6.6.6.6, 1.2.3.4, 10.0.0.2", ("10.0.0.0/8",), "1.2.3.4"),  # 6.6.6.6 is what the caller says
        ("10.0.0.1", "", ("10.0.0.0/8",), "10.0.0.1"),
        ("9.9.9.9", "1.2.3.4", ("10.0.0.0/8",), "9.9.9.9"),
    ],
)
def test_a_forwarded_address_is_believed_as_far_as_our_proxies_wrote_it(peer, forwarded_for, trusted, caller):
    assert client_address(peer, forwarded_for, trusted) == caller


def test_a_line_of_the_client_does_not_hide_the_line_of_our_proxy():
    lines = [(b"x-forwarded-for", b"10.0.0.1"), (b"host", b"x"), (b"x-forwarded-for", b"192.0.2.7")]
    assert client_address("10.9.9.9", forwarded(lines), ("10.0.0.0/8",)) == "192.0.2.7"


async def test_a_key_outside_its_scopes_is_refused_by_name(rig: Rig):
    async def use(**scopes: Any) -> None:
        key, rig.secret = await rig.tenants.create_key(rig.org.id, rig.project.id, "narrow", scopes=Scopes(**scopes))
        await publish_key_state(rig.redis, key)
        rig.client.headers["authorization"] = f"Bearer {rig.secret}"

    await use(models=("other",))
    assert code_of(await post(rig)) == (404, "model_not_found")
    assert (await rig.client.get("/v1/models")).json()["data"] == []
    assert (await rig.client.get("/v1/models/tiny")).status_code == 404
    await use(endpoints=("/v1/models",))
    assert code_of(await post(rig)) == (403, "permission_denied")
    assert [model["id"] for model in (await rig.client.get("/v1/models")).json()["data"]] == ["tiny"]
    await use(networks=("192.0.2.0/24",))
    assert code_of(await post(rig)) == (403, "permission_denied")
    assert code_of(await post(rig, **{"x-forwarded-for": "192.0.2.1"})) == (403, "permission_denied")
    assert (await rig.client.get("/v1/models")).status_code == 403
    await use(networks=("127.0.0.0/8",))
    assert code_of(await post(rig, NO_MODEL)) == (404, "model_not_found")
    assert await rig.nothing_queued_or_reserved()


async def test_a_projects_scopes_bind_its_keys_from_the_next_request(rig: Rig):
    assert code_of(await post(rig, NO_MODEL)) == (404, "model_not_found")
    await Bounds(rig.gateway.engine).set_project(
        rig.org.id, rig.project.id, limits=Limits(requests_per_minute=7), scopes=Scopes(endpoints=("/v1/files",))
    )
    assert await announcer(rig).publish_pending() >= 1
    await eventually(lambda: not rig.gateway.auth._cache)
    assert code_of(await post(rig)) == (403, "permission_denied")


# -- rotation and import ---------------------------------------------------------------------------


async def test_a_rotated_key_works_with_both_secrets_until_the_overlap_ends(rig: Rig):
    old = rig.secret
    key, new = await rig.tenants.rotate(rig.org.id, rig.key.id, overlap=dt.timedelta(hours=1))
    await publish_key_state(rig.redis, key)
    for secret in (old, new):
        assert code_of(await post(rig, NO_MODEL, authorization=f"Bearer {secret}")) == (404, "model_not_found")
    by_old = await rig.tenants.find_by_hash(hash_key(old))
    assert by_old is not None
    assert dt.timedelta(minutes=59) < by_old.expires_at - dt.datetime.now(dt.UTC) <= dt.timedelta(hours=1)
    revoked = await rig.tenants.revoke(rig.org.id, rig.key.id)
    await publish_key_state(rig.redis, revoked)
    for secret in (old, new):
        assert (await post(rig, authorization=f"Bearer {secret}")).status_code == 401


async def test_an_imported_key_works_as_it_is_and_is_marked_for_rotation(rig: Rig):
    plain = "sk-elsewhere-0123456789abcdef"
    limits = Limits(requests_per_minute=9)
    key = await rig.tenants.import_key(rig.org.id, rig.project.id, "old", key_hash=hash_key(plain), limits=limits)
    await publish_key_state(rig.redis, key)
    assert (key.imported, key.limits) == (True, limits)
    assert code_of(await post(rig, NO_MODEL, authorization=f"Bearer {plain}")) == (404, "model_not_found")
    with pytest.raises(KeyKnown):
        await rig.tenants.import_key(rig.org.id, rig.project.id, "again", key_hash=hash_key(plain))
    rotated, _ = await rig.tenants.rotate(rig.org.id, key.id)
    assert not rotated.imported
    for record in rig.redis, rig.gateway.engine:
        assert plain not in repr(record)


# -- revocation and holds --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def streaming(rig: Rig, at: Rig):
    """A stream through gateway `at` with one token delivered; gives its submit, its handle and the task."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(at, {**HELLO, "stream": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        await eventually(lambda: at.gateway.table.find(submit.rid).placed)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await handle.tokens("some ")
        await eventually(lambda: at.gateway.table.find(submit.rid).output.first_sent_s)
        yield submit, handle, asked


async def test_a_revoked_key_ends_its_running_streams_on_every_gateway_and_pays_for_what_was_made(rig: Rig, other: Rig):
    await other.register(rig.decode)
    async with streaming(rig, other) as (submit, handle, asked):
        await rig.tenants.revoke(rig.org.id, rig.key.id)
        await announcer(rig).publish_pending()
        await eventually(lambda: rig.decode.aborts)
        await handle.finish(FinishReason.ABORTED, prompt=8, completion=1)
    events = events_of(asked.result().text)
    assert events[-1]["error"]["code"] == "invalid_api_key"
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cause) == (Outcome.CLIENT_LEFT, "key_revoked")
    assert event.cost == 8 * 100 + 1 * 400
    assert [(await post(at)).status_code for at in (rig, other)] == [401, 401]


async def test_a_revocation_whose_announcer_died_is_published_by_the_gateways(rig: Rig):
    assert code_of(await post(rig, NO_MODEL)) == (404, "model_not_found")
    await rig.tenants.revoke(rig.org.id, rig.key.id)  # and nobody publishes it

    async def refused() -> bool:
        return (await post(rig)).status_code == 401

    async with asyncio.TaskGroup() as tasks:
        again = tasks.create_task(rig.gateway._watcher.reload())
        await eventually(refused)
        again.cancel()


@pytest.mark.parametrize("kind", ["org", "project", "model"])
async def test_what_is_suspended_is_refused_everywhere_until_it_is_resumed(rig: Rig, other: Rig, kind: str):
    name = {"org": rig.org.id, "project": rig.project.id, "model": "tiny"}[kind]
    org = None if kind == "model" else rig.org.id
    book = HoldBook(rig.gateway.engine)
    await other.register(rig.decode)
    async with streaming(rig, other) as (submit, handle, asked):
        await book.put(Hold(kind=kind, id=name, mode=SUSPENDED, reason="unpaid", actor="test"), org=org)
        await announcer(rig).publish_pending()
        await eventually(lambda: rig.decode.aborts)
        await handle.finish(FinishReason.ABORTED, prompt=8, completion=1)
    assert events_of(asked.result().text)[-1]["error"]["code"] == "suspended"
    assert (await rig.usage(submit.rid)).cause == "suspended"
    refused = (503, "no_capacity") if kind == "model" else (403, "suspended")
    for at in (rig, other):
        await eventually(lambda at=at: at.gateway.holds._held)
        assert code_of(await post(at)) == refused
        assert (await at.client.get("/v1/models")).status_code == (200 if kind == "model" else 403)
    assert await book.lift(kind, name, org=org, actor="test")
    await announcer(rig).publish_pending()
    for at in (rig, other):
        await eventually(lambda at=at: not at.gateway.holds._held)
        assert code_of(await post(at, NO_MODEL)) == (404, "model_not_found")
    async with rig.gateway.engine.connect() as db:
        query = sa.select(change.c.actor, change.c.action).where(change.c.subject == name, change.c.action != "created")
        rows = (await db.execute(query.order_by(change.c.id))).all()
    assert [tuple(row) for row in rows] == [("test", SUSPENDED), ("test", "resumed")]


async def test_a_tenant_that_may_only_read_reads_and_its_running_stream_drains(rig: Rig):
    async with streaming(rig, rig) as (submit, handle, asked):
        hold = Hold(kind="org", id=rig.org.id, mode=READ_ONLY, drain=True, actor="test")
        await HoldBook(rig.gateway.engine).put(hold, org=rig.org.id)
        await announcer(rig).publish_pending()
        await eventually(lambda: rig.gateway.holds._held)
        assert code_of(await post(rig)) == (403, "suspended")
        await handle.tokens("more")
        await handle.finish(FinishReason.STOP, prompt=8, completion=2)
    assert events_of(asked.result().text)[-1] == "[DONE]"
    assert (await rig.client.get("/v1/models")).status_code == 200
    assert (await rig.client.get(f"/v1/requests/{submit.rid}")).status_code == 200


async def test_a_gateway_that_starts_knows_what_is_held(rig: Rig):
    await HoldBook(rig.gateway.engine).put(Hold(kind="model", id="tiny", mode=SUSPENDED, actor="test"), org=None)
    await rig.redis.delete("pdgate:changes")
    rig.gateway.holds.replace([])
    async with asyncio.TaskGroup() as tasks:
        again = tasks.create_task(rig.gateway._watcher.reload())
        await eventually(lambda: rig.gateway.holds._held)
        again.cancel()


# -- dimensions ------------------------------------------------------------------------------------


async def test_what_a_request_says_of_itself_is_in_its_usage_event_and_no_longer_than_allowed(rig: Rig):
    await Bounds(rig.gateway.engine).set_project(
        rig.org.id, rig.project.id, limits=Limits(), scopes=Scopes(hashes_identifiers=True)
    )
    await announcer(rig).publish_pending()
    body = {**HELLO, "user": "u" * 500, "safety_identifier": "person@example.org", "metadata": {"team": "red"}}
    headers = {"x-request-id": "their-name", "traceparent": "garbage" * 100}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(rig, body, **headers))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "full", 1)
    assert asked.result().headers["x-request-id"] == submit.rid
    assert "garbage" not in submit.owner.traceparent
    assert len(submit.session) == 128
    said = (await rig.usage(submit.rid)).dimensions
    assert (len(said.user), said.reference, dict(said.tags)) == (128, "their-name", {"team": "red"})
    assert len(said.safety_identifier) == 32
    assert "person" not in said.safety_identifier


async def test_a_request_that_was_admitted_as_its_key_was_revoked_does_not_run(rig: Rig):
    """The revocation is seen between the reservation and the table of running requests."""
    rig.gateway.auth.revoked(rig.key.id)  # the shard does not know it yet, so the reservation passes
    answer = await post(rig)
    assert code_of(answer) == (401, "invalid_api_key")
    assert len(rig.gateway.table) == 0

    async def nothing_reserved() -> bool:
        return not [key async for key in rig.redis.scan_iter(match="*:res:*")]

    await eventually(nothing_reserved)
