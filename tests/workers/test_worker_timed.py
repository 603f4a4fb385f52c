"""The timed engine behind the real server: text, counts, stops, KV room and the real hand-off."""

import msgspec

from contracts.lifecycle import FinishReason, Phase
from contracts.wire import counts_from_pb
from tests.workers.peers import FAST, new_attempt, pair_submits, submit_of, timed_pair, unified_bench
from workers.engines.faults import CORRUPT_KV, DROP_KV, LOSE_HAND_OFF
from workers.engines.timed_text import expected_ids, expected_text, safe_split

PROMPT = list(range(100, 140))


async def test_the_answer_is_the_expected_text_ids_and_counts():
    async with unified_bench() as bench:
        attempt = await bench.submit(PROMPT, max_tokens=20)
        answer = await bench.gateway.answer(attempt)
    assert answer.text == expected_text(PROMPT, 20)
    assert answer.ids == expected_ids(PROMPT, 20)
    assert answer.reason is FinishReason.LENGTH
    counts = counts_from_pb(answer.finished.counts)
    assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (40, 0, 20)
    assert answer.finished.stages.first_token_ms > 0


async def test_another_prompt_or_seed_gives_another_text():
    async with unified_bench() as bench:
        plain = await bench.gateway.answer(await bench.submit(PROMPT))
        seeded = await bench.gateway.answer(await bench.submit(PROMPT, seed=7))
        other = await bench.gateway.answer(await bench.submit([*PROMPT, 1]))
    assert seeded.text == expected_text(PROMPT, 16, seed=7)
    assert len({plain.text, seeded.text, other.text}) == 3


async def test_a_repeated_prompt_is_cached_by_full_pages_within_its_salt_only():
    async with unified_bench() as bench:
        await bench.gateway.answer(await bench.submit(PROMPT, cache_salt="a"))
        again = await bench.gateway.answer(await bench.submit(PROMPT, cache_salt="a"))
        foreign = await bench.gateway.answer(await bench.submit(PROMPT, cache_salt="b"))
    assert again.finished.counts.cached_tokens == 32  # two of three pages of 16 are full
    assert foreign.finished.counts.cached_tokens == 0


async def test_a_stop_string_across_tokens_ends_the_answer_before_it():
    text = expected_text(PROMPT, 16)
    words = text.split(" ")
    stop = words[5][-2:] + " " + words[6][:2]
    async with unified_bench() as bench:
        answer = await bench.gateway.answer(await bench.submit(PROMPT, stop=(stop, "not in it")))
    assert answer.reason is FinishReason.STOP
    assert answer.text == text[: text.index(stop)]
    assert answer.finished.matched_stop == stop
    assert answer.finished.counts.completion_tokens == len(answer.ids) == 6


async def test_min_tokens_lets_an_early_stop_string_pass():
    text = expected_text(PROMPT, 16)
    stop = text.split(" ")[2]
    async with unified_bench() as bench:
        answer = await bench.gateway.answer(await bench.submit(PROMPT, stop=(stop,), min_tokens=12))
    assert len(answer.ids) >= 12
    assert answer.text.startswith(expected_text(PROMPT, 11))


def test_text_that_could_become_a_stop_string_is_held_back():
    assert safe_split("abcEN", ("END",)) == (3, None)
    assert safe_split("abcEND", ("END",)) == (3, "END")
    assert safe_split("abc", ("END",)) == (3, None)
    assert safe_split("xENDyFIN", ("FIN", "END")) == (1, "END")


async def test_requests_wait_for_kv_room_and_all_finish_right():
    small = msgspec.structs.replace(FAST, kv_capacity_tokens=300)
    prompts = [[i * 1000 + j for j in range(100)] for i in range(6)]
    async with unified_bench(small) as bench:
        attempts = [await bench.submit(prompt, max_tokens=80) for prompt in prompts]
        answers = [await bench.gateway.answer(attempt) for attempt in attempts]
        load = bench.worker.engine.load()
    assert [a.text for a in answers] == [expected_text(p, 80) for p in prompts]
    assert (load.kv_used_tokens, load.num_running, load.num_waiting) == (0, 0, 0)


async def test_a_prompt_that_never_fits_is_rejected():
    small = msgspec.structs.replace(FAST, kv_capacity_tokens=100)
    async with unified_bench(small) as bench:
        await bench.submit(list(range(200)))
        rejected = await bench.leader.next_of("rejected", lambda _: True)
    assert rejected.code == "bad_request"
    assert "200" in rejected.message


async def test_the_decode_worker_makes_the_text_of_the_kv_it_was_given():
    async with timed_pair() as pair:
        attempt = await pair.submit(PROMPT, max_tokens=12)
        decode = await pair.decode_gateway.answer(attempt, Phase.DECODE)
        prefill = await pair.prefill_gateway.answer(attempt, Phase.PREFILL)
        done = await pair.prefill_leader.next_of("prefill_done", lambda _: True)
        assert pair.decode.engine.load().prefill_chunks_done == 0
        assert pair.prefill.engine.load().kv_used_tokens == pair.decode.engine.load().kv_used_tokens == 0
    assert decode.text == expected_text(PROMPT, 12)
    assert decode.finished.counts.completion_tokens == 12
    assert decode.finished.stages.transfer_ms > 0
    assert prefill.text == ""
    assert prefill.reason is FinishReason.STOP
    assert (prefill.finished.counts.prompt_tokens, prefill.finished.counts.completion_tokens) == (40, 0)
    assert done.counts.prompt_tokens == 40


async def test_prefill_may_be_submitted_before_decode_or_after_it():
    async with timed_pair() as pair:
        early = new_attempt()
        to_prefill, to_decode = pair_submits(pair.prefill, pair.decode, PROMPT, early)
        await pair.prefill_leader.send(submit=to_prefill)
        await pair.prefill_leader.next_of("prefill_done", lambda _: True)
        await pair.decode_leader.send(submit=to_decode)
        answer = await pair.decode_gateway.answer(early, Phase.DECODE)
    assert answer.text == expected_text(PROMPT, 16)


async def test_a_dropped_payload_gives_a_wrong_text():
    async with timed_pair() as pair:
        pair.prefill.faults.on.add(DROP_KV)
        answer = await pair.decode_gateway.answer(await pair.submit(PROMPT), Phase.DECODE)
    assert answer.reason is FinishReason.LENGTH
    assert answer.text != expected_text(PROMPT, 16)


async def test_a_damaged_payload_is_refused_before_any_token():
    async with timed_pair() as pair:
        pair.prefill.faults.on.add(CORRUPT_KV)
        decode = await pair.decode_gateway.answer(await pair.submit(PROMPT), Phase.DECODE)
    assert (decode.reason, decode.ids) == (FinishReason.HAND_OFF, [])


async def test_a_hand_off_that_never_arrives_ends_both_sides():
    async with timed_pair(hand_off_timeout_s=0.2) as pair:
        pair.prefill.faults.on.add(LOSE_HAND_OFF)
        attempt = await pair.submit(PROMPT)
        decode = await pair.decode_gateway.answer(attempt, Phase.DECODE)
        prefill = await pair.prefill_gateway.answer(attempt, Phase.PREFILL)
    assert decode.reason is prefill.reason is FinishReason.HAND_OFF
    assert decode.ids == []
    assert prefill.finished.counts.prompt_tokens == 40


async def test_one_side_alone_gives_up():
    async with timed_pair(hand_off_timeout_s=0.2) as pair:
        lonely_prefill, lonely_decode = new_attempt(), new_attempt()
        to_prefill, _ = pair_submits(pair.prefill, pair.decode, PROMPT, lonely_prefill)
        _, to_decode = pair_submits(pair.prefill, pair.decode, PROMPT, lonely_decode)
        await pair.prefill_leader.send(submit=to_prefill)
        await pair.decode_leader.send(submit=to_decode)
        prefill = await pair.prefill_gateway.answer(lonely_prefill, Phase.PREFILL)
        decode = await pair.decode_gateway.answer(lonely_decode, Phase.DECODE)
    assert prefill.reason is decode.reason is FinishReason.HAND_OFF


async def test_a_prefill_worker_that_is_not_there_fails_the_hand_off():
    async with timed_pair() as pair:
        attempt = new_attempt()
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 5}
        submit = submit_of(pair.decode, PROMPT, attempt=attempt, phase=Phase.DECODE, **fields)
        await pair.decode_leader.send(submit=submit)
        answer = await pair.decode_gateway.answer(attempt, Phase.DECODE)
    assert answer.reason is FinishReason.HAND_OFF


async def test_an_abort_of_the_decode_side_frees_both():
    slow = msgspec.structs.replace(FAST, prefill=msgspec.structs.replace(FAST.prefill, fixed_ms=60_000.0))
    async with timed_pair(slow) as pair:
        attempt = await pair.submit(PROMPT)
        await pair.prefill_leader.next_of("status", lambda s: s.num_running == 1)
        await pair.decode_gateway.abort(attempt)
        decode = await pair.decode_gateway.answer(attempt, Phase.DECODE)
        prefill = await pair.prefill_gateway.answer(attempt, Phase.PREFILL)
        assert pair.prefill.engine.load().kv_used_tokens == pair.decode.engine.load().kv_used_tokens == 0
    assert decode.reason is FinishReason.ABORTED
    assert prefill.reason is FinishReason.HAND_OFF
