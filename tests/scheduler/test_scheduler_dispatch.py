"""A request from the inbox to real timed workers and back."""

from rig import Rig, eventually

from contracts.lifecycle import FinishReason, Path


async def test_a_request_runs_on_a_pair_and_is_forgotten_once_settled(rig: Rig):
    prefill, decode = await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=8)
    await eventually(lambda: request.reason() is not None)
    assert request.reason() is FinishReason.LENGTH
    assert len(request.tokens[1, 0]) == 8
    await eventually(lambda: request.placed)
    placed = request.placed[0]
    assert (placed.path, placed.attempt) == (Path.PD, 1)
    assert placed.prefill.worker_id == prefill.worker_id
    assert placed.decode.worker_id == decode.worker_id
    assert placed.reason == "least_loaded_pair"
    await gateway.finish(request)
    await eventually(lambda: len(pool.term.book) == 0)
    await eventually(lambda: not prefill.server.assignments.finals.all() and not decode.server.assignments.finals.all())
    assert all(w.num_requests == 0 for w in pool.registry.workers())
