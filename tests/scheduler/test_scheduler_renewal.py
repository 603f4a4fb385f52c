"""Workers are replaced, and zones are lost, under requests: none is lost with them."""

import asyncio
import time
from contextlib import asynccontextmanager

import msgspec
from rig import FAST, Rig, eventually
from rig_fleet import RigFleet
from rig_gateway import POOL
from test_scheduler_autoscaler import QUICK, leading, told

from contracts import keys
from contracts.lifecycle import FinishReason, Role
from contracts.perf import DecodeCost
from contracts.scaling import Scaling
from scheduler.policy.headcount import ScaleLimits
from scheduler.policy.ratio import Mode

STEADY = msgspec.structs.replace(FAST, decode=DecodeCost(fixed_ms=10.0))
# On a slow machine the same load may ask for more workers: here only floors and renewals start any.
NOT_BY_LOAD = msgspec.structs.replace(QUICK, scale=ScaleLimits(period_s=0.1, min_arrivals=1_000_000))
TWO = Scaling(max_workers=4, idle_s=600, min_unified=2)
PAIRS = Scaling(max_workers=8, idle_s=600, min_prefill=2, min_decode=2)


class Load:
    """Requests that follow each other, a few at a time, continued or started again where a gateway would do so."""

    def __init__(self, gateway) -> None:
        self._gateway = gateway
        self.requests = []

    async def run(self) -> None:
        while True:
            request = await self._gateway.submit(max_tokens=15)
            self.requests.append(request)
            while not self.ended(request):
                await asyncio.sleep(0.01)
                for lost in [n for n in request.lost if not n.retrying and n.attempt not in request.answered]:
                    request.answered.add(lost.attempt)
                    go_on = request.tokens.get((lost.attempt, 0))
                    await (self._gateway.go_on if go_on else self._gateway.start_again)(request, lost.attempt)

    @staticmethod
    def ended(request) -> bool:
        if not hasattr(request, "answered"):
            request.answered = set()
        attempts = [placed.attempt for placed in request.placed]
        return bool(request.refused) or any(request.reason(a) is FinishReason.LENGTH for a in attempts)

    async def more(self, number: int) -> None:
        """Wait until so many more have ended."""
        goal = sum(map(self.ended, self.requests)) + number
        await eventually(lambda: sum(map(self.ended, self.requests)) >= goal, "requests go on ending")


@asynccontextmanager
async def under_load(gateway, streams=4):
    load = Load(gateway)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(load.run()) for _ in range(streams)]
        yield load
        for task in running:
            task.cancel()
    assert not any(request.refused for request in load.requests)


async def order_renewal(rig: Rig) -> None:
    await rig.redis.set(keys.renewal(POOL), int(time.time() * 1000) + 1)


async def test_workers_are_replaced_one_by_one_under_requests_and_none_is_lost(rig: Rig):
    fleet = RigFleet(rig, room=4, latency=STEADY)
    gateway = await rig.gateway()
    pool = await leading(rig, TWO, fleet, helm=NOT_BY_LOAD)
    async with under_load(gateway) as load:
        await eventually(lambda: len(fleet.workers) == 2, "the floor")
        await load.more(5)
        first = {spec.worker_id for spec in fleet.started}
        await order_renewal(rig)
        await eventually(lambda: set(fleet.stopped) >= first, "replaced")
        await told(rig, lambda seen: seen.why not in ("renew", "renewing"))
        await load.more(10)
    assert (len(fleet.started), len(fleet.stopped)) == (4, 2)
    assert fleet.most == 3
    assert not any(request.lost for request in load.requests)
    assert pool.term.helm.autoscaler.serving


async def test_pairs_are_never_made_of_two_revisions_while_one_replaces_the_other(rig: Rig):
    fleet = RigFleet(rig, room=8, latency=STEADY, model_revision="r1")
    gateway = await rig.gateway()
    await leading(rig, PAIRS, fleet, helm=NOT_BY_LOAD)
    async with under_load(gateway) as load:
        await eventually(lambda: len(fleet.workers) == 5, "one, then two pairs")
        await load.more(5)
        first = {worker.epoch for worker in rig.workers}
        fleet.facts = {**fleet.facts, "model_revision": "r2"}
        await order_renewal(rig)
        await eventually(lambda: len(fleet.stopped) == 5, "all of them are replaced")
        await load.more(10)
    revisions = {worker.epoch: worker._registered.model_revision for worker in rig.workers}
    pairs = [placed for request in load.requests for placed in request.placed if placed.prefill is not None]
    made = {(revisions[placed.prefill.epoch], revisions[placed.decode.epoch]) for placed in pairs}
    assert made <= {("r1", "r1"), ("r2", "r2")}
    last = load.requests[-1].placed or load.requests[-5].placed
    assert last[-1].decode.epoch not in first
    assert not any(request.lost for request in load.requests)


async def test_a_revision_that_does_not_stay_up_replaces_nobody(rig: Rig):
    fleet = RigFleet(rig, room=4, latency=STEADY)
    gateway = await rig.gateway()
    await leading(rig, TWO, fleet, helm=NOT_BY_LOAD)
    async with under_load(gateway) as load:
        await eventually(lambda: len(fleet.workers) == 2, "the floor")
        fleet.may_boot.clear()
        await order_renewal(rig)
        await eventually(lambda: len(fleet.started) == 3, "its first one")
        fleet.fail(fleet.started[-1].worker_id)
        await told(rig, lambda seen: seen.why == "renewal_held")
        await load.more(10)
    assert len(fleet.started) == 3
    assert fleet.stopped == []


async def test_a_lost_zone_costs_no_request_and_the_other_one_makes_up_for_it(rig: Rig):
    fleet = RigFleet(rig, room=3, zones=("a", "b"), latency=STEADY)
    gateway = await rig.gateway()
    limits = ScaleLimits(period_s=0.1, stranded_s=0.2)
    helm = msgspec.structs.replace(QUICK, scale=limits, mode=Mode.SHADOW)  # roles stay
    pool = await leading(rig, msgspec.structs.replace(TWO, max_workers=2, zones=("a", "b")), fleet, helm=helm)

    def zones() -> list[str]:
        return sorted(worker.registration.zone for worker in fleet.workers.values())

    async with under_load(gateway) as load:
        await eventually(lambda: zones() == ["a", "b"], "one in each zone")
        await load.more(5)
        await fleet.lose_zone("b")
        await eventually(lambda: zones() == ["a", "a"], "another one in the zone that is left")
        await eventually(lambda: sum(w.ready for w in pool.registry.workers()) == 2, "it serves")
        await load.more(10)
    assert len(fleet.stopped) == 1  # nobody waits for a zone that is gone
    assert {spec.role for spec in fleet.started} == {Role.UNIFIED}
