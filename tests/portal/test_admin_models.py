"""The admin API: a model is added while everything runs, refused with the reason, and removed when nobody uses it."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from portal_rig import PortalRig

import gateway.new_models
from contracts import keys
from contracts.additions import AddedModel, read_added
from contracts.catalog import Model
from contracts.wire import Change, encode
from gateway.changes import announce
from gateway.model_book import ModelBook
from tests.gateway.gateway_rig import HELLO, PeerWorker, eventually
from tests.model_folders import write_model

MODELS = "/admin/v1/models"
PRICE = {"prefill_computed": "0.10", "prefill_cached": "0.02", "decode": "0.40"}
GB = 1_000_000_000


@pytest.fixture
def folder(tmp_path: Path, models_dir: Path) -> Path:
    return write_model(tmp_path / "new", models_dir / "tiny")


def body(folder: Path, **more: Any) -> dict[str, Any]:
    return {"name": "new", "folder": str(folder), "price": PRICE, "prefill": 1, "decode": 1, **more}


async def lease(portal: PortalRig, worker: PeerWorker, *, pool: str) -> None:
    registration = encode(msgspec.structs.replace(worker.registration(), pool=pool, address="127.0.0.1:1"))
    await portal.rig.redis.zadd(keys.pool_workers(pool), {worker.worker_id: 9e15})
    await portal.rig.redis.set(keys.worker_lease(pool, worker.worker_id), registration, px=600_000)


async def refusal(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[int, str, str]:
    answer = await client.post(MODELS, json=asked)
    return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["message"]


async def test_an_added_model_is_known_priced_and_told_to_every_process(
    portal: PortalRig, operator: httpx.AsyncClient, billing: None, folder: Path
) -> None:
    made = await operator.post(MODELS, json=body(folder, aliases=["fresh"]))
    assert made.status_code == 201, made.text
    value = made.json()["value"]
    assert (value["id"], value["pool"], value["source"], value["context_tokens"]) == ("new", "new", "added", 1024)
    (told,) = await read_added(portal.rig.redis) or ()
    assert (told.name, told.folder, list(told.workers)) == ("new", str(folder), ["new-prefill-1", "new-decode-1"])
    prices = (await operator.get("/admin/v1/prices", params={"model": "new"})).json()["data"]
    assert [one["value"]["price"]["decode"] for one in prices] == [400_000_000]
    listed = (await portal.rig.client.get("/v1/models/fresh")).json()
    assert (listed["id"], listed["ready"]) == ("new", False)
    answer = await portal.rig.client.post("/v1/chat/completions", json={**HELLO, "model": "new"})
    assert answer.status_code == 503  # no workers yet
    for number, role in enumerate((portal.rig.prefill.role, portal.rig.decode.role)):
        await lease(portal, PeerWorker(f"new-{number}", role), pool="new")
    await portal.rig.gateway.prices.refresh()
    await eventually(lambda: not portal.rig.gateway.models.missing("new"))
    recorded = (await operator.get("/admin/v1/audit", params={"kind": "model"})).json()["data"]
    assert [(one["action"], one["subject"]) for one in recorded] == [("added", "new")]


async def test_a_model_is_refused_without_whole_weights(
    portal: PortalRig, operator: httpx.AsyncClient, billing: None, folder: Path
) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    status, code, message = await refusal(operator, body(folder))
    assert (status, code) == (409, "no_weights")
    assert "is not whole" in message
    assert (await refusal(operator, body(folder / "nowhere")))[:2] == (409, "no_weights")
    assert await read_added(portal.rig.redis) == ()


async def test_a_model_is_refused_without_the_memory_that_its_workers_need(
    operator: httpx.AsyncClient, billing: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of some 4,200 bytes and 1,024 tokens of cache at 256 bytes: 0.27 MB; here also 1.5 GB of the engine's."""
    monkeypatch.setattr(gateway.new_models, "free_memory_bytes", lambda: 3 * GB + 500_000)
    status, code, message = await refusal(operator, body(folder))
    assert (status, code) == (409, "no_memory")
    assert "2 workers need 3.00 GB here" in message
    elsewhere = body(folder, prefill=0, decode=0)
    assert "say what the devices of one have" in (await refusal(operator, elsewhere))[2]
    assert (await refusal(operator, {**elsewhere, "worker_memory_gb": 0.0002}))[:2] == (409, "no_memory")
    assert (await operator.post(MODELS, json={**elsewhere, "worker_memory_gb": 0.0004})).status_code == 201


async def test_a_model_is_refused_without_a_price_unless_the_book_has_one(
    portal: PortalRig, operator: httpx.AsyncClient, billing: None, folder: Path
) -> None:
    without = body(folder)
    del without["price"]
    assert (await refusal(operator, without))[:2] == (409, "no_price")
    assert (await operator.post("/admin/v1/prices", json={"model": "new", **PRICE})).status_code == 201
    await portal.rig.gateway.prices.refresh()
    assert (await operator.post(MODELS, json=without)).status_code == 201


async def test_while_billing_is_away_no_model_is_added(operator: httpx.AsyncClient, folder: Path) -> None:
    assert (await operator.post(MODELS, json=body(folder))).status_code == 503
    assert [one["value"]["id"] for one in (await operator.get(MODELS)).json()["data"]] == ["tiny"]


WRONG: list[dict[str, Any]] = [
    {"name": "tiny"},
    {"name": "tiny-alias"},
    {"aliases": ["tiny"]},
    {"aliases": ["new"]},
    {"name": "../new"},
    {"decode": 0},
    {"context_tokens": 2048},  # the model was made for 1,024
    {"folder": "../../etc"},
    {"profile": "../x"},
    {"price": {**PRICE, "decode": "-1"}},
    {"workers": 3},
]


async def test_what_cannot_be_is_refused_and_changes_nothing(
    portal: PortalRig, operator: httpx.AsyncClient, billing: None, folder: Path
) -> None:
    for wrong in WRONG:
        answer = await operator.post(MODELS, json={**body(folder), **wrong})
        assert answer.status_code == 400, (wrong, answer.text)
    assert list(portal.rig.gateway.catalog.models) == ["tiny"]


async def test_a_model_is_removed_when_nobody_uses_it_and_until_then_its_users_are_named(
    portal: PortalRig, operator: httpx.AsyncClient, billing: None, folder: Path
) -> None:
    assert (await operator.post(MODELS, json=body(folder))).status_code == 201
    await operator.put("/admin/v1/model-names/chat", json={"targets": [{"model": "new"}], "unready": True})
    await lease(portal, PeerWorker("by-hand", portal.rig.prefill.role), pool="new")
    await lease(portal, PeerWorker("new-decode-1", portal.rig.decode.role), pool="new")
    await portal.rig.redis.xadd(keys.inbox("new"), {"d": b"a request"})
    refused = await operator.delete(f"{MODELS}/new")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
    message = refused.json()["error"]["message"]
    for said in ("it is not paused", "the name chat means it", "1 requests run or wait", "started by others: by-hand"):
        assert said in message
    assert "new-decode-1" not in message

    assert (await operator.put(f"{MODELS}/new/hold", json={"drain": True})).status_code == 200
    await operator.delete("/admin/v1/model-names/chat")
    await portal.rig.redis.delete(keys.inbox("new"), keys.worker_lease("new", "by-hand"))
    gone = await operator.delete(f"{MODELS}/new")
    assert gone.json() == {"id": "new", "object": "model", "deleted": True}
    assert await read_added(portal.rig.redis) == ()
    assert (await portal.rig.client.get("/v1/models/new")).status_code == 404
    held = {hold.id for hold in await portal.rig.gateway.admin.organisations.holds.all()}
    assert "new" not in held
    assert (await operator.post(MODELS, json=body(folder))).status_code == 201  # and may come back


async def test_what_the_file_names_is_removed_there(operator: httpx.AsyncClient) -> None:
    refused = await operator.delete(f"{MODELS}/tiny")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "catalogue")


async def test_only_operators_add_and_remove(admin: httpx.AsyncClient, folder: Path) -> None:
    assert (await admin.post(MODELS, json=body(folder))).status_code == 403
    assert (await admin.delete(f"{MODELS}/tiny")).status_code == 403


async def test_another_gateway_hears_of_it(portal: PortalRig) -> None:
    """What another one wrote to the table is known here as soon as it is told."""
    price = portal.rig.gateway.catalog.models["tiny"].price
    model = Model(tokenizer="tiny", context_tokens=64, price=price)
    other = AddedModel(name="elsewhere", model=model, folder="/models/x")
    await ModelBook(portal.rig.gateway.engine).add(other, actor="another gateway")
    await announce(portal.rig.redis, Change(kind="catalogue", id="elsewhere", state=""))
    await eventually(lambda: "elsewhere" in portal.rig.gateway.catalog.models)
