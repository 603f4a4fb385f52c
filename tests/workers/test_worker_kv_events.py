"""The names of blocks on the wire: what a leader hears of a worker's cache."""

import asyncio

import psutil

from contracts.lifecycle import Phase, Role
from contracts.prefix import prompt_blocks, scope, unpack_blocks
from contracts.v1 import worker_pb2 as pb
from contracts.wire import pack_ids
from tests.workers.peers import Gateway, Leader, new_attempt, prompt_of, running_worker, submit_of, timed_pair
from workers.kv_table import KvTable
from workers.machine import Machine


def held(leader: Leader) -> set[int]:
    names: set[int] = set()
    for events in leader.of("kv_events"):
        if events.cleared:
            names.clear()
        names |= set(unpack_blocks(events.stored))
        names -= set(unpack_blocks(events.removed))
    return names


async def test_a_leader_hears_the_blocks_of_a_prompt_and_everything_again_on_demand():
    kv = KvTable("r")
    wanted = set(prompt_blocks(pack_ids(prompt_of(200)), scope(model_revision="r", salt="a")))
    async with running_worker(Role.UNIFIED, kv=kv) as worker, asyncio.TaskGroup() as tasks:
        leader, gateway = Leader(worker.address), Gateway(worker.address)
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=worker.epoch)
        attempt = new_attempt()
        await leader.send(submit=submit_of(worker, prompt_of(200), attempt=attempt, cache_salt="a"))
        await gateway.answer(attempt)
        await leader.until(lambda: held(leader) == wanted)
        numbers = [events.seq for events in leader.of("kv_events")]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        told = len(numbers)
        await leader.send(kv_resync=pb.KvResync())
        await leader.until(lambda: len(leader.of("kv_events")) >= told + 2)
        assert leader.of("kv_events")[told].cleared
        assert held(leader) == wanted
        await gateway.detach()
        await leader.close()


async def test_status_sums_hand_offs_and_prompt_tokens_by_where_they_were_found():
    async with timed_pair() as pair:
        for _ in range(2):
            attempt = await pair.submit(prompt_of(200))
            await pair.decode_gateway.answer(attempt, Phase.DECODE)
            await pair.prefill_leader.final(attempt, Phase.PREFILL)
        status = await pair.prefill_leader.next_of("status", lambda s: s.transfers_done == 2)
        other = await pair.decode_leader.next_of("status", lambda s: s.tokens_produced > 0)
    assert (status.hit_device_tokens, status.computed_tokens) == (192, 208)  # twelve pages of 16 the second time
    assert status.transfer_exposed_ms > 0
    assert status.transfers_failed == 0
    assert (other.transfers_done, other.computed_tokens) == (0, 0)


def test_network_counters_leave_loopback_out_and_are_read_once_a_second():
    clock = [0.0]
    machine = Machine(now_s=lambda: clock[0])
    first, second = pb.Status(), pb.Status()
    machine.fill(first)
    machine.fill(second)
    others = [c for name, c in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    assert first.HasField("nic_received_bytes")
    assert first.nic_received_bytes == second.nic_received_bytes <= sum(c.bytes_recv for c in others)
