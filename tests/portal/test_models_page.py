"""The operators' page of models: added, paused and removed by forms, with what stands in the way said beside them."""

from pathlib import Path

import pytest
from admin_rig import with_csrf
from portal_rig import Browser, PortalRig

import gateway.new_models
from contracts.additions import read_added
from contracts.errors import BadRequest
from gateway.new_models import NewModel, NewModelPrice
from gateway.portal.roles import Role
from gateway.portal.views.models import new_model
from tests.gateway.gateway_rig import HELLO, eventually
from tests.model_folders import write_model

PAGE = "/portal/fleet/models"
PRICE = {"prefill_computed": "0.10", "prefill_cached": "0.02", "decode_price": "0.40"}


@pytest.fixture
def folder(tmp_path: Path, models_dir: Path) -> Path:
    return write_model(tmp_path / "new", models_dir / "tiny")


@pytest.fixture
async def operator_page(portal: PortalRig) -> Browser:
    return await with_csrf(await portal.signed_in(Role.OPERATOR))


def typed(folder: Path, **more: str) -> dict[str, str]:
    return {"name": "new", "folder": str(folder), "prefill": "1", "decode": "1", "unified": "", **PRICE, **more}


async def test_a_model_is_added_paused_and_removed_on_the_page(
    portal: PortalRig, operator_page: Browser, billing: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.new_models, "free_memory_bytes", lambda: 10**12)
    assert "tiny" in (await operator_page.get(PAGE)).text
    answer = await operator_page.post(PAGE, typed(folder, aliases="fresh, newer"))
    assert (answer.status_code, answer.headers["location"]) == (303, PAGE)
    (told,) = await read_added(portal.rig.redis) or ()
    assert (told.name, list(told.model.aliases), list(told.workers)) == (
        "new", ["fresh", "newer"], ["new-prefill-1", "new-decode-1"],
    )  # fmt: skip
    page = (await operator_page.get(PAGE)).text
    assert "also fresh, newer" in page
    assert f'{PAGE}/new/remove"' in page
    assert f'{PAGE}/tiny/remove"' not in page  # the catalogue's
    refused = await operator_page.post(f"{PAGE}/new/remove", form=PAGE)
    assert refused.status_code == 409
    assert "is in use: it is not paused" in refused.text.replace("&#39;", "'")
    assert (await operator_page.post(f"{PAGE}/tiny/remove", form=PAGE)).status_code == 409
    hold = {"model": "new", "on": "1", "page": "models"}
    paused = await operator_page.post("/portal/fleet/models/hold", hold, form=PAGE)
    assert paused.headers["location"] == PAGE
    asked = {**HELLO, "model": "new"}
    await eventually(lambda: ("model", "new") in portal.rig.gateway.holds._held)
    assert (await portal.rig.client.post("/v1/chat/completions", json=asked)).status_code == 503
    assert "Resume new" in (await operator_page.get(PAGE)).text
    assert (await operator_page.post(f"{PAGE}/new/remove", form=PAGE)).status_code == 303
    assert await read_added(portal.rig.redis) == ()
    assert (await portal.rig.client.post("/v1/chat/completions", json=asked)).status_code == 404


async def test_a_refusal_is_said_and_what_was_typed_stays(
    portal: PortalRig, operator_page: Browser, billing: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.new_models, "free_memory_bytes", lambda: 1_000_000)
    nothing = dict.fromkeys(PRICE, "")
    for wanted, status, words in (
        (typed(folder / "nowhere"), 409, "config.json"),
        (typed(folder), 409, "2 workers need"),
        (typed(folder, worker_memory_gb="1") | nothing, 409, "A model without a price is not served"),
        (typed(folder, decode_price=""), 400, "Missing required parameter: 'price.decode'"),
        (typed(folder, decode="many"), 400, "Invalid value for 'decode'"),
        (typed(folder, name="tiny"), 400, "'tiny' names something already"),
        (typed(folder, name=""), 400, "Missing required parameter: 'name'"),
        (typed(folder, decode=""), 400, "A prefill worker needs a decode worker"),
        (typed(folder, name='"><script>alert(1)</script>'), 400, "Invalid value for 'name'"),
    ):
        answer = await operator_page.post(PAGE, wanted)
        text = answer.text.replace("&#39;", "'")
        assert (answer.status_code, words in text) == (status, True), (wanted, answer.text[-3000:])
        assert f'value="{wanted["folder"]}"' in answer.text
        assert "<script>alert" not in answer.text
    assert await read_added(portal.rig.redis) == ()


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.OPERATOR])
async def test_the_page_is_for_operators(portal: PortalRig, role: Role) -> None:
    browser = await with_csrf(await portal.signed_in(role))
    for path in (PAGE, f"{PAGE}/tiny/remove"):
        assert (await browser.client.post(path, data={})).status_code == 403
    assert (await browser.get(PAGE)).status_code == 403


def test_empty_fields_are_not_said_and_numbers_are_read() -> None:
    wanted = new_model({"name": "m", "folder": "f", "prefill": "", "decode": "2", "ttft_ms": "12.5", **PRICE})
    price = NewModelPrice(prefill_computed="0.10", prefill_cached="0.02", decode="0.40")
    assert wanted == NewModel(name="m", folder="f", decode=2, ttft_ms=12.5, price=price)
    with pytest.raises(BadRequest, match="ttft_ms"):
        new_model({"name": "m", "folder": "f", "ttft_ms": "0"})
