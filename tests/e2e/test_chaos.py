"""Faults of most kinds under load, in a fixed order: nothing wrong, lost, doubled or kept. `make chaos` does more."""

import pytest

from benches.chaos.plan import PLAN, SHORT
from benches.chaos.rounds import rounds_of
from benches.chaos.site import running
from benches.worker_faults import service_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


async def test_no_fault_of_the_short_plan_does_harm():
    with service_folder(keep=False) as folder:
        async with running(folder, None) as site, rounds_of(site, seed=1) as rounds:
            undisturbed = await rounds.run(None)
            assert not undisturbed.account.bad, undisturbed.account.notes
            for name_of_fault in SHORT:
                done = await rounds.run(next(fault for fault in PLAN if fault.name == name_of_fault))
                assert not done.account.bad, (done.fault, done.account.notes)
                assert done.calls > 10
