"""The real SGLang goes on with an answer that another worker began, on the pair that the whole run shares."""

import pytest

from contracts.lifecycle import FinishReason
from contracts.wire import pack_ids
from tests.workers.engine_client import client_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

GREEDY = {"temperature": 0.0, "max_tokens": 32}


def told(engines, ids: list[int]) -> str:
    """What a client has of these tokens: everything but a split character."""
    return engines.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("number", [1, 3])
async def test_an_answer_goes_on_elsewhere_from_any_token(engines, number: int):
    prompt = engines.prompts[number]
    async with client_of(engines) as client:
        whole = await client.unified(prompt, **GREEDY)
        for cut in (1, 7, 8, 9, 31, 32):
            chars = len(told(engines, whole.ids[:cut]))
            for held in (0, min(3, chars)):  # a worker may have held text of its last tokens back
                said = whole.text[: chars - held]
                head = {"delivered": pack_ids(whole.ids[:cut]), "delivered_chars": len(said), **GREEDY}
                prefill, pair = await client.pair(prompt, **head)
                alone = await client.unified(prompt, **head)
                assert (said + pair.text, said + alone.text) == (whole.text, whole.text), cut
                assert pair.ids == alone.ids == whole.ids[cut:]
                assert pair.reason is alone.reason is FinishReason.LENGTH
    assert alone.finished.counts.completion_tokens == 0  # at the last cut only the end was missing
    assert prefill.finished.counts.prompt_tokens == 0


async def test_what_it_goes_on_with_depends_on_what_was_delivered(engines):
    """The control of the test above."""
    prompt = engines.prompts[1]
    async with client_of(engines) as client:
        whole = await client.unified(prompt, **GREEDY)
        wrong = [*whole.ids[:7], (whole.ids[7] + 1) % 1000]
        _, other = await client.pair(prompt, delivered=pack_ids(wrong), delivered_chars=0, **GREEDY)
    assert other.ids != whole.ids[8:]
    assert other.finished.counts.prompt_tokens == len(prompt) + 8


async def test_a_seed_goes_on_with_its_own_tokens(engines):
    sampled = {"temperature": 1.0, "max_tokens": 24, "seed": 11}
    prompt = engines.prompts[2]
    async with client_of(engines) as client:
        whole = await client.unified(prompt, **sampled)
        said = told(engines, whole.ids[:10])
        head = {"delivered": pack_ids(whole.ids[:10]), "delivered_chars": len(said), **sampled}
        _, pair = await client.pair(prompt, **head)
    assert said + pair.text == whole.text


async def test_a_stop_string_over_the_cut_is_found_and_the_engine_let_go(engines):
    prompt = engines.prompts[1]
    async with client_of(engines) as client:
        whole = await client.unified(prompt, temperature=0.0, max_tokens=200)
        texts = [told(engines, whole.ids[:n]) for n in range(len(whole.ids) + 1)]
        cuts = [n for n in range(8, 40) if len(texts[n - 2]) < len(texts[n]) < len(texts[n + 1])]
        cut = cuts[0]
        stop = whole.text[len(texts[cut]) - 2 : len(texts[cut]) + 2]
        expected = whole.text[: whole.text.index(stop)]
        chars = min(len(texts[cut]) - 2, len(expected))
        head = {"delivered": pack_ids(whole.ids[:cut]), "delivered_chars": chars, "stop": (stop,)}
        _, pair = await client.pair(prompt, temperature=0.0, max_tokens=1000, **head)
        await client.idle("decode")
        await client.idle("prefill")
    assert whole.text[:chars] + pair.text == expected
    assert (pair.reason, pair.finished.matched_stop) == (FinishReason.STOP, stop)
