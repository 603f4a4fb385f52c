"""The real SGLang: a prefill and a decode worker with a real KV hand-off, beside a unified one.

Everything goes through the workers' gRPC calls, as a gateway and a scheduler would do it. The last
tests end two of the workers that the whole run shares: this file's tests are the last that use them.
"""

import asyncio
import signal

import psutil
import pytest

from contracts.lifecycle import FinishReason, Phase
from contracts.wire import counts_from_pb
from tests.engines import PEER_TIMEOUT_S, TEXTS
from tests.workers.engine_client import client_of
from tests.workers.peers import new_attempt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EXIT_ENGINE_DIED = 70
GREEDY = {"temperature": 0.0, "max_tokens": 32}


async def test_the_pair_says_what_the_unified_engine_says_and_decode_computes_no_prompt(engines):
    async with client_of(engines) as client:
        before = (await client.idle("decode")).prefill_chunks_done
        reference = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
        pairs = [await client.pair(prompt, **GREEDY) for prompt in engines.prompts]
        prefill_status, decode_status = await client.idle("prefill"), await client.idle("decode")
    assert [decode.text for _, decode in pairs] == [answer.text for answer in reference]
    assert [decode.ids for _, decode in pairs] == [answer.ids for answer in reference]
    assert len({answer.text for answer in reference}) == len(TEXTS)
    assert decode_status.prefill_chunks_done == before
    assert prefill_status.prefill_chunks_done > 0
    assert decode_status.tokens_produced > 0
    assert prefill_status.tokens_produced == 0


async def test_counts_come_from_the_side_that_knows(engines):
    prompt = engines.prompts[4]
    async with client_of(engines) as client:
        prefill, decode = await client.pair(prompt, cache_salt="counts", **GREEDY)
        again, _ = await client.pair(prompt, cache_salt="counts", **GREEDY)
        foreign, _ = await client.pair(prompt, cache_salt="other", **GREEDY)
        final = await client.leaders["prefill"].next_of("final", lambda f: f.counts.cached_tokens > 0)
    counts = counts_from_pb(prefill.finished.counts)
    assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (len(prompt), 0, 0)
    assert decode.finished.counts.completion_tokens == len(decode.ids) == 32
    assert decode.reason is FinishReason.LENGTH
    assert prefill.reason is FinishReason.STOP
    assert prefill.finished.stages.transfer_ms > 0
    assert 0 < again.finished.counts.cached_tokens < len(prompt)
    assert foreign.finished.counts.cached_tokens == 0
    assert final.counts == again.finished.counts


async def test_one_token_answers_and_stop_strings_are_those_of_the_unified_engine(engines):
    prompt = engines.prompts[1]
    async with client_of(engines) as client:
        whole = await client.unified(prompt, **GREEDY)
        _, one = await client.pair(prompt, temperature=0.0, max_tokens=1)
        stop = whole.text[12:18]
        reference = await client.unified(prompt, stop=(stop,), **GREEDY)
        _, stopped = await client.pair(prompt, stop=(stop,), **GREEDY)
    assert one.ids == whole.ids[:1]
    assert one.finished.counts.completion_tokens == 1
    assert stopped.reason is FinishReason.STOP
    assert stopped.finished.matched_stop == stop
    assert stopped.text == reference.text == whole.text[: whole.text.index(stop)]


async def test_without_the_kv_payload_the_text_is_another(engines):
    engines.faults.write_text("drop_kv")
    try:
        async with client_of(engines) as client:
            before = (await client.idle("decode")).prefill_chunks_done
            reference = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
            broken = [await client.pair(prompt, cache_salt="dropped", **GREEDY) for prompt in engines.prompts]
            status = await client.idle("decode")
    finally:
        engines.faults.unlink()
    equal = [decode.text == answer.text for (_, decode), answer in zip(broken, reference, strict=True)]
    assert equal == [False] * len(TEXTS)
    assert status.prefill_chunks_done == before


async def test_concurrent_requests_keep_their_own_text(engines):
    async with client_of(engines) as client:
        reference = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
        attempts = [await client.submit_pair(prompt, **GREEDY) for prompt in engines.prompts * 3]
        ends = [await client.ends(attempt) for attempt in attempts]
    assert [decode.text for _, decode in ends] == [answer.text for answer in reference] * 3


async def test_an_abort_in_mid_decode_stops_at_once_and_frees_everything(engines):
    async with client_of(engines) as client:
        attempt = await client.submit_pair(engines.prompts[1], temperature=0.0, max_tokens=1500, ignore_eos=True)
        decode = client.gateways["decode"]
        key = (attempt, 2)
        await decode.until(lambda: key in decode.answers and len(decode.answers[key].ids) >= 6)
        seen = len(decode.answers[key].ids)
        await decode.abort(attempt)
        answer = await decode.answer(attempt, Phase.DECODE)
        await client.idle("decode")
        await client.idle("prefill")
        _, after = await client.pair(engines.prompts[1], **GREEDY)
    assert answer.reason is FinishReason.ABORTED
    assert answer.finished.counts.completion_tokens == len(answer.ids)
    assert len(answer.ids) < seen + 100  # of 1,500: the rest is what was on its way
    assert after.reason is FinishReason.LENGTH


async def test_an_abort_in_the_instant_of_submission_is_not_lost(engines):
    async with client_of(engines) as client:
        attempts = []
        for _ in range(4):
            attempt = await client.submit_pair(engines.prompts[4], temperature=0.0, max_tokens=1500, ignore_eos=True)
            await client.gateways["decode"].abort(attempt)
            await client.gateways["prefill"].abort(attempt)
            attempts.append(attempt)
        ends = [await client.ends(attempt) for attempt in attempts]
        await client.idle("decode")
        await client.idle("prefill")
    assert all(decode.reason is FinishReason.ABORTED for _, decode in ends)


async def test_a_seed_makes_sampling_repeatable(engines):
    sampled = {"temperature": 1.0, "max_tokens": 16}
    async with client_of(engines) as client:
        texts = [(await client.pair(engines.prompts[1], seed=seed, **sampled))[1].text for seed in (5, 5, 6)]
        unified = await client.unified(engines.prompts[1], seed=5, **sampled)
        _, unseeded = await client.pair(engines.prompts[1], **sampled)
    assert texts[0] == texts[1] == unified.text
    assert texts[2] != texts[0]
    assert unseeded.text not in texts


async def test_what_would_kill_the_engine_is_refused_before(engines):
    async with client_of(engines) as client:
        bad = [
            client.unified_submit(engines.prompts[0], min_p=0.1, seed=3),
            client.unified_submit([1_000_000]),
            client.unified_submit(engines.prompts[0], max_tokens=100_000),
            client.unified_submit(engines.prompts[0], adapter="none"),
        ]
        leader = client.leaders["unified"]
        for submit in bad:
            await leader.send(submit=submit)
        await leader.next_of("status", lambda _: len(leader.of("rejected")) == len(bad))
        codes = {rejected.code for rejected in leader.of("rejected")}
        after = await client.unified(engines.prompts[0], **GREEDY)
    assert codes == {"bad_request"}
    assert after.reason is FinishReason.LENGTH


async def test_one_side_alone_gives_up_after_the_peer_timeout(engines):
    async with client_of(engines) as client:
        lonely_prefill, lonely_decode = new_attempt(), new_attempt()
        to_prefill, _ = client.pair_submits(engines.prompts[0], lonely_prefill)
        _, to_decode = client.pair_submits(engines.prompts[0], lonely_decode)
        await client.leaders["prefill"].send(submit=to_prefill)
        await client.leaders["decode"].send(submit=to_decode)
        async with asyncio.timeout(PEER_TIMEOUT_S * 4):
            prefill = await client.gateways["prefill"].answer(lonely_prefill, Phase.PREFILL, within_s=60)
            decode = await client.gateways["decode"].answer(lonely_decode, Phase.DECODE, within_s=60)
        await client.idle("decode")
    assert prefill.reason is decode.reason is FinishReason.HAND_OFF
    assert decode.ids == []


def test_a_worker_whose_engine_died_leaves_with_its_own_exit_code(engines):
    """The last test of the module: it costs the unified worker."""
    process = engines.unified.process
    children = psutil.Process(process.pid).children(recursive=True)
    scheduler = next(child for child in children if "scheduler" in child.name())
    scheduler.kill()
    assert process.wait(30) == EXIT_ENGINE_DIED
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert "a process of the engine died" in engines.unified.log.read_text()


def test_a_worker_stops_cleanly_on_sigterm(engines):
    """After the one above, for the same reason: it costs the decode worker."""
    children = psutil.Process(engines.decode.process.pid).children(recursive=True)
    engines.decode.process.send_signal(signal.SIGTERM)
    assert engines.decode.process.wait(15) == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
