"""Attach: batching, acknowledgements, replay, overflow and lost readers."""

import asyncio

from contracts.lifecycle import FinishReason
from contracts.wire import FINISH_FROM_PB, attempt_from_pb
from tests.workers.peers import Gateway, new_attempt, unified_bench
from workers.engines.timed_text import expected_ids, expected_text
from workers.outbox import Limits

PROMPT = list(range(50))


async def test_one_step_of_many_requests_travels_as_one_batch():
    prompts = [[i, i + 1, i + 2] for i in range(24)]
    async with unified_bench() as bench:
        attempts = [await bench.submit(prompt, max_tokens=40) for prompt in prompts]
        answers = [await bench.gateway.answer(attempt) for attempt in attempts]
        num_steps = bench.worker.engine.num_steps
    assert [a.text for a in answers] == [expected_text(p, 40) for p in prompts]
    assert len(bench.gateway.batches) <= num_steps
    assert [b.seq for b in bench.gateway.batches] == list(range(1, len(bench.gateway.batches) + 1))


async def test_what_opens_brings_the_notice_of_its_placement_along():
    async with unified_bench() as bench:
        placed = await bench.submit(PROMPT, max_tokens=2, placed=b"notice")
        plain = await bench.submit(PROMPT, max_tokens=2)
        for attempt in (placed, plain):
            await bench.gateway.answer(attempt)
        opened = [one for batch in bench.gateway.batches for one in batch.opened]
    assert {attempt_from_pb(one.id): one.placed for one in opened} == {placed: b"notice", plain: b""}


async def test_a_gateway_that_attaches_again_misses_and_repeats_nothing():
    async with unified_bench(auto_ack=False) as bench:
        attempt = await bench.submit(PROMPT, max_tokens=150)
        gateway = bench.gateway
        for seen in (3, 9, 30):
            await gateway.until(lambda seen=seen: len(gateway.batches) >= seen)
            await gateway.detach()
            await gateway.attach(bench.tasks, epoch=bench.worker.epoch)
        answer = await gateway.answer(attempt)
    assert answer.ids == expected_ids(PROMPT, 150)
    assert [b.seq for b in gateway.batches] == list(range(1, len(gateway.batches) + 1))
    assert not any(b.lost for b in gateway.batches)


async def test_an_unacknowledged_batch_is_replayed_to_the_next_stream():
    async with unified_bench(auto_ack=False) as bench:
        attempt = await bench.submit(PROMPT, max_tokens=5)
        first = await bench.gateway.answer(attempt)
        await bench.gateway.ack(1)
        await bench.gateway.detach()
        again = Gateway(bench.worker.address, auto_ack=False)
        again._handles = bench.gateway._handles
        await again.attach(bench.tasks, epoch=bench.worker.epoch, last_seq=1)
        await again.until(lambda: any(b.finished for b in again.batches))
        assert again.batches[0].seq == 2
        assert [b.seq for b in again.batches] == [b.seq for b in bench.gateway.batches[1:]]
        await again.detach()
    assert first.text.startswith(expected_text(PROMPT, 5))


async def test_an_end_counts_as_delivered_once_its_batch_is_acknowledged():
    async with unified_bench(auto_ack=False) as bench:
        attempt = await bench.submit(PROMPT, max_tokens=3)
        await bench.gateway.answer(attempt)
        final = await bench.leader.final(attempt)
        assert not final.delivered
        assert not bench.leader.of("delivered")
        await bench.gateway.ack(bench.gateway.last_seq)
        delivered = await bench.leader.next_of("delivered", lambda _: True)
        assert attempt_from_pb(delivered.id) == attempt
        assert bench.worker.server.assignments.finals.all()[0].delivered


async def test_a_gateway_that_never_acknowledges_overflows_its_ring():
    async with unified_bench(auto_ack=False, limits=Limits(max_chunks=60)) as bench:
        attempt = await bench.submit(PROMPT, max_tokens=500)
        final = await bench.leader.final(attempt)
        await bench.gateway.until(lambda: bench.gateway.batches[-1].lost)
        assert FINISH_FROM_PB[final.reason] is FinishReason.READER_LOST
        assert 0 < final.counts.completion_tokens < 500
        after = await bench.submit(PROMPT, max_tokens=5)
        answer = await bench.gateway.answer(after)
    assert answer.text == expected_text(PROMPT, 5)


async def test_requests_without_a_reader_end_with_reader_lost():
    async with unified_bench(limits=Limits(reader_lost_s=0.3)) as bench:
        attempt = await bench.submit(PROMPT, max_tokens=1500, gateway_id="nobody")
        kept = await bench.submit(PROMPT, max_tokens=400)
        final = await bench.leader.final(attempt)
        answer = await bench.gateway.answer(kept)
    assert FINISH_FROM_PB[final.reason] is FinishReason.READER_LOST
    assert final.gateway_id == "nobody"
    assert not final.delivered
    assert answer.reason is FinishReason.LENGTH


async def test_a_gateway_that_returns_after_its_ring_was_dropped_is_told_so():
    async with unified_bench(limits=Limits(reader_lost_s=0.2)) as bench:
        attempt = await bench.submit(PROMPT, max_tokens=1500)
        await bench.gateway.until(lambda: len(bench.gateway.batches) >= 3)
        await bench.gateway.detach()
        await bench.leader.final(attempt)
        last_seq = bench.gateway.last_seq
        await bench.gateway.attach(bench.tasks, epoch=bench.worker.epoch)
        after = await bench.submit(PROMPT, max_tokens=5)
        answer = await bench.gateway.answer(after)
        told = [b for b in bench.gateway.batches if b.lost]
    assert answer.text == expected_text(PROMPT, 5)
    assert [b.seq > last_seq for b in told] == [True]


async def test_a_second_stream_of_a_gateway_takes_over():
    async with unified_bench() as bench:
        attempt = await bench.submit(PROMPT, max_tokens=300)
        await bench.gateway.until(lambda: len(bench.gateway.batches) >= 3)
        second = Gateway(bench.worker.address)
        second._handles, second.answers = bench.gateway._handles, bench.gateway.answers
        claimed = bench.gateway.stop_taking()  # what it took and acknowledged later, the second would have to know
        await second.attach(bench.tasks, epoch=bench.worker.epoch, last_seq=claimed)
        await asyncio.wait([bench.gateway._reader], timeout=10)
        answer = await second.answer(attempt)
        await second.detach()
    assert answer.reason is FinishReason.LENGTH
    assert answer.text == expected_text(PROMPT, 300)
    assert bench.gateway._reader.done()


async def test_an_abort_on_attach_stops_the_request_within_a_step_or_two():
    async with unified_bench() as bench:
        attempt = await bench.submit(PROMPT, max_tokens=1500)
        await bench.gateway.until(lambda: len(bench.gateway.batches) >= 5)
        await bench.gateway.abort(attempt)
        answer = await bench.gateway.answer(attempt)
        load = bench.worker.engine.load()
    assert answer.reason is FinishReason.ABORTED
    assert answer.finished.counts.completion_tokens == len(answer.ids) < 1500
    assert (load.num_running, load.kv_used_tokens) == (0, 0)


async def test_an_abort_that_overtakes_its_submit_wins():
    async with unified_bench() as bench:
        attempt = new_attempt()
        await bench.gateway.abort(attempt)
        await bench.leader.next_of("status", lambda _: bool(bench.worker.server.assignments._tombstones))
        await bench.submit(PROMPT, attempt=attempt)
        answer = await bench.gateway.answer(attempt)
        await bench.leader.next_of("accepted", lambda _: True)
    assert answer.reason is FinishReason.ABORTED
    assert answer.finished.counts.prompt_tokens == 0


async def test_all_samples_of_an_attempt_are_aborted_together():
    async with unified_bench() as bench:
        rid_owner = new_attempt()
        samples = [type(rid_owner)(rid_owner.rid, 1, sample) for sample in range(3)]
        for sample in samples:
            await bench.submit(PROMPT, attempt=sample, max_tokens=1500)
        other = await bench.submit(PROMPT, max_tokens=30)
        await bench.gateway.until(lambda: len(bench.gateway.answers) == 4)
        await bench.gateway.abort(samples[0], all_samples=True)
        reasons = [(await bench.gateway.answer(sample)).reason for sample in samples]
        kept = await bench.gateway.answer(other)
    assert reasons == [FinishReason.ABORTED] * 3
    assert kept.reason is FinishReason.LENGTH
