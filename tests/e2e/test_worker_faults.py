"""Workers that die, freeze or cannot be reached under 32 streams: no wrong byte, nothing lost, nothing billed twice."""

import pytest

from benches.worker_faults import FAULTS, measured, running, service_folder

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.mark.parametrize("hand_off", ["direct", "store"])
async def test_no_fault_of_a_worker_or_a_link_reaches_a_client(hand_off: str):
    with service_folder(keep=False) as folder:
        async with running(folder, hand_off) as bench:
            await bench.whole()
            expected = [reader.text for reader in (await bench.streams())[0]]
            rows = [await measured(bench, fault, expected) for fault in FAULTS]
    for row in rows:
        harm = {name: row[name] for name in ("lost", "wrong", "misbilled", "unbalanced")}
        assert not any(harm.values()), row
    # All prefill workers gone: the ladder says so within a second of the loss.
    assert rows[-1]["step_s"] < 1.0
    # A dead or cut off decode worker holds streams up, and they go on.
    assert any(row["continued"] for row in rows)
