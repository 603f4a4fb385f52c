"""The admin API: who steers a pool, and models that are paused."""

import httpx
from portal_rig import PortalRig


async def test_an_operator_steers_a_pool_and_pauses_a_model(portal: PortalRig, operator: httpx.AsyncClient) -> None:
    workers = (await operator.get("/admin/v1/workers", params={"role": "prefill"})).json()["data"]
    assert [one["value"]["worker_id"] for one in workers] == ["prefill-0"]
    assert (await operator.get("/admin/v1/pools/tiny/steering")).json()["value"] == {"source": "settings"}
    nothing = await operator.put("/admin/v1/pools/tiny/steering", json={"mode": "manual", "prefill": 2})
    assert nothing.status_code == 409
    endless = await operator.put("/admin/v1/pools/tiny/steering", json={"mode": "auto", "decode": 2**64})
    assert endless.status_code == 400
    kept = await operator.put("/admin/v1/pools/tiny/steering", json={"mode": "manual", "prefill": 1, "decode": 1})
    assert kept.status_code == 200, kept.text
    assert (await operator.get("/admin/v1/pools/tiny/steering")).json()["value"]["mode"] == "manual"
    assert (await operator.delete("/admin/v1/pools/tiny/steering")).status_code == 200
    paused = await operator.put("/admin/v1/models/tiny-alias/hold", json={"reason": "maintenance"})
    assert paused.json()["id"] == "tiny"
    assert (await operator.get("/admin/v1/models")).json()["data"][0]["value"]["paused"]
    assert (await operator.delete("/admin/v1/models/tiny/hold")).json()["deleted"]
    assert (await operator.get("/admin/v1/pools/nowhere/series")).status_code == 404
    assert (await operator.get("/admin/v1/pools/tiny/decisions")).status_code == 404
