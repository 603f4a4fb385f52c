"""The fleet of a Kubernetes namespace, by the official client's HTTP. No cluster has run it: in_memory_kubernetes."""

import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import cache

import pytest
from kubernetes.aio import client
from msgspec.structs import replace

from contracts.lifecycle import Role
from scheduler.fleet.kubernetes import KubernetesFleet
from scheduler.fleet.kubernetes_objects import POOL as POOL_LABEL
from scheduler.fleet.kubernetes_objects import ROLE, TEMPLATE, WORKER
from scheduler.fleet.protocol import Capacity, FleetError, FleetUnreachable, InstanceState, NoRoom
from tests.deploy.helm_chart import Manifest, of_kind, rendered
from tests.scheduler_fleet.fleet_contract import (
    OTHER_POOL,
    POOL,
    PRICE_NANO,
    PROGRAM,
    ROOM,
    FleetContract,
    gone,
    instances,
    running,
    said,
    spec,
    until,
)
from tests.scheduler_fleet.in_memory_kubernetes import NAMESPACE, in_memory_kubernetes

ZONED, BIG = "zoned", "big"


def entry(pool, role, **more):
    zone = more.get("zone", "")
    name = "-".join(filter(None, (pool, role, zone, "spot" if more.get("spot") else "")))
    return {"name": name, "pool": pool, "role": role, "managed": True, "modelPath": "m", "maxWorkers": ROOM,
            "perHourNano": PRICE_NANO, "env": {} if zone else {"WORKER_ZONE": ""}, **more}  # fmt: skip


VALUES = {
    "workerDefaults": {
        "command": [sys.executable, "-I", "-S", "-c", PROGRAM],
        "engine": "timed",
        "env": {"OWN": "$(WORKER_ID)"},
    },
    "workers": [
        *(entry(POOL, role) for role in Role),
        entry(OTHER_POOL, "decode"),
        *(entry(ZONED, role, zone=zone) for role in ("prefill", "decode") for zone in ("a", "b")),
        entry(ZONED, "decode", zone="a", spot=True, maxWorkers=2, perHourNano=PRICE_NANO // 4),
        entry(BIG, "decode", nodes=3, command=["sleep", "600"]),
    ],
}


@cache
def templates() -> Sequence[Manifest]:
    """Return what `helm install` would make for the workers."""
    kinds = of_kind(rendered(VALUES), "Deployment", "LeaderWorkerSet")
    return [manifest for manifest in kinds if TEMPLATE in manifest["metadata"]["labels"]]


class KubernetesRig:
    within_s = 60.0

    def __init__(self, server, fleet, another):
        self.server = server
        self.fleet = fleet
        self.another = another

    async def kill(self, instance):
        self.server.pod_of(instance.spec.worker_id).process.kill()


@asynccontextmanager
async def kubernetes_rig(folder, **more):
    async with in_memory_kubernetes(folder, **more) as server:
        for manifest in deepcopy(templates()):
            server.take("deployments" if manifest["kind"] == "Deployment" else "leaderworkersets", manifest)
        api = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.port}"))
        try:

            def fleet():
                return KubernetesFleet(api, namespace=NAMESPACE, release="pdgate")

            yield KubernetesRig(server, fleet(), fleet)
        finally:
            await api.close()


class TestKubernetesFleet(FleetContract):
    @pytest.fixture
    async def rig(self, tmp_path):
        async with kubernetes_rig(tmp_path) as rig:
            yield rig


@pytest.fixture
async def rig(tmp_path):
    async with kubernetes_rig(tmp_path) as rig:
        yield rig


async def test_a_worker_of_a_template_that_has_changed_is_outdated(rig):
    for worker_id in ("w-1", "w-2"):
        await rig.fleet.start(spec(worker_id, Role.PREFILL if worker_id == "w-1" else Role.DECODE))
    assert [one.outdated for one in await rig.fleet.list(POOL)] == [False, False]
    (template,) = [
        body
        for (_, name), body in rig.server.objects.items()
        if name not in ("w-1", "w-2")
        and (body["metadata"]["labels"][POOL_LABEL], body["metadata"]["labels"][ROLE]) == (POOL, "prefill")
    ]
    template["spec"]["template"]["spec"]["containers"][0]["image"] = "pdgate:next"
    assert {one.spec.worker_id: one.outdated for one in await rig.fleet.list(POOL)} == {"w-1": True, "w-2": False}
    await rig.fleet.start(spec("w-3", Role.PREFILL))
    assert {one.spec.worker_id: one.outdated for one in await rig.fleet.list(POOL)} == {
        "w-1": True,
        "w-2": False,
        "w-3": False,
    }


async def test_a_worker_is_its_template_with_a_name_of_its_own(rig):
    await rig.fleet.start(spec("w-1", Role.PREFILL))
    made = rig.server.objects["deployments", "w-1"]
    template = rig.server.objects["deployments", f"pdgate-{POOL}-prefill"]
    assert made["spec"]["replicas"] == 1
    assert made["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "pdgate",
        "app.kubernetes.io/instance": "pdgate",
        "app.kubernetes.io/component": "worker",
        "pdgate.dev/workers": f"{POOL}-prefill",
        WORKER: "w-1",
    }
    assert [o["uid"] for o in made["metadata"]["ownerReferences"]] == [template["metadata"]["uid"]]
    assert template["spec"]["replicas"] == 0
    for part in ("volumes", "securityContext", "terminationGracePeriodSeconds"):
        assert made["spec"]["template"]["spec"][part] == template["spec"]["template"]["spec"][part]


async def test_zones_and_spot_are_templates_of_their_own(rig):
    assert await rig.fleet.capacity(ZONED) == Capacity(free={"a": 3, "b": 3}, free_spot={"a": 2})
    await rig.fleet.start(spec("w-1", Role.PREFILL, ZONED, zone="b"))
    await rig.fleet.start(spec("w-2", Role.DECODE, ZONED))  # where most room is
    await rig.fleet.start(spec("w-3", Role.DECODE, ZONED, spot=True))
    await said(rig, "w-1", f"{ZONED} b")
    assert (await running(rig, "w-1", ZONED)).node == "node-b"
    assert {i.spec.worker_id: (i.zone, i.spec.spot) for i in await rig.fleet.list(ZONED)} == {
        "w-1": ("b", False),
        "w-2": ("a", False),
        "w-3": ("a", True),
    }
    price = await rig.fleet.price(ZONED)
    assert (price.per_hour, price.spot_per_hour) == (PRICE_NANO, PRICE_NANO // 4)
    with pytest.raises(FleetError, match="no template for unified"):
        await rig.fleet.start(spec("w-4", Role.UNIFIED, ZONED))


async def test_a_zone_where_a_worker_waits_for_a_machine_has_no_more_room(rig):
    rig.server.full.add("b")
    await rig.fleet.start(spec("w-1", pool=ZONED, zone="b"))

    async def waits():
        return "Insufficient nvidia.com/gpu" in (await instances(rig.fleet, ZONED))["w-1"].message

    await until(rig, waits)
    assert (await instances(rig.fleet, ZONED))["w-1"].state is InstanceState.PLACING
    assert (await rig.fleet.capacity(ZONED)).free == {"a": 3, "b": 0}
    with pytest.raises(NoRoom, match="in b"):
        await rig.fleet.start(spec("w-2", pool=ZONED, zone="b"))
    await rig.fleet.stop("w-1", grace_s=0.1)

    async def nothing():
        return not await rig.fleet.list(ZONED)

    await until(rig, nothing)


async def test_a_worker_of_several_machines_is_one_instance_and_goes_as_one(rig):
    await rig.fleet.start(spec("w-1", pool=BIG))
    await running(rig, "w-1", BIG)
    assert {pod.name for pod in rig.server.pods.values()} == {"w-1-0", "w-1-0-1", "w-1-0-2"}
    commands = {pod.name: pod.template["spec"]["containers"][0]["command"][1] for pod in rig.server.pods.values()}
    assert all("$(LWS_WORKER_INDEX)" in command for command in commands.values())
    await rig.fleet.stop("w-1", grace_s=0.5)

    async def nothing():
        return not await rig.fleet.list(BIG)

    await until(rig, nothing)
    assert rig.server.pods == {}


async def test_a_pod_that_somebody_else_evicts_tells_when_it_will_be_gone(rig):
    await rig.fleet.start(spec("w-1"))
    first = await running(rig, "w-1")
    assert first.reclaimed_unix_ms is None
    pod = rig.server.pod_of("w-1")
    pod.deleted_at = "2026-01-01T00:00:30Z"  # announced; it still runs
    assert (await instances(rig.fleet))["w-1"].reclaimed_unix_ms == 1_767_225_630_000
    pod.delete(0.1)

    async def elsewhere():
        now = (await instances(rig.fleet)).get("w-1")
        return now and now.state is InstanceState.RUNNING and rig.server.pod_of("w-1") is not pod

    await until(rig, elsewhere)


async def test_a_cluster_without_leader_worker_sets_has_the_others(tmp_path):
    async with kubernetes_rig(tmp_path, with_groups=False) as rig:
        await rig.fleet.start(spec("w-1"))
        await running(rig, "w-1")
        await rig.fleet.stop("w-1", grace_s=0.1)
        await gone(rig, "w-1")
        with pytest.raises(FleetError, match="no pool 'big'"):
            await rig.fleet.capacity(BIG)


async def test_an_api_server_that_is_away_or_refuses_is_unreachable(rig):
    rig.server.down = True
    with pytest.raises(FleetUnreachable, match="503"):
        await rig.fleet.list(POOL)
    rig.server.down = False
    template = rig.server.objects["deployments", f"pdgate-{POOL}-decode"]
    template["spec"]["template"]["spec"]["nonsense"] = 1
    with pytest.raises(FleetUnreachable, match="422"):
        await rig.fleet.start(spec("w-1"))
    del template["spec"]["template"]["spec"]["nonsense"]
    rig.server.objects["deployments", "w-1"] = {"metadata": {"name": "w-1", "labels": {}}, "spec": {"replicas": 0}}
    with pytest.raises(FleetError, match="is no worker"):
        await rig.fleet.start(spec("w-1"))


@pytest.mark.parametrize("worker_id", ["W-1", "1w", "w_1", "w" * 60, "", "w-"])
async def test_a_worker_that_no_object_can_be_named_after_is_refused(rig, worker_id):
    with pytest.raises(FleetError, match="no name of an object"):
        await rig.fleet.start(replace(spec("w-1"), worker_id=worker_id))
