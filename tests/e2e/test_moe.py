"""A tiny Qwen3-MoE under a pair: what one engine says, and only with the KV cache; and which experts each role hits."""

import subprocess

import pytest

from contracts.experts import distance, imbalance
from contracts.wire import unpack_ids
from tests.engines import running_engines, tiny_model
from tests.processes import REPOSITORY, engine_python
from tests.workers.engine_client import client_of
from tests.workers.peers import Leader

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(800)]

LAYERS, EXPERTS, EXPERTS_PER_TOKEN = 2, 8, 2  # of moe_files.py
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture
def experts(tmp_path):
    """Three workers with the model."""
    model = tmp_path / "model"
    script = REPOSITORY / "tests/e2e/moe_files.py"
    subprocess.run([engine_python(), script, tiny_model(), model], check=True, timeout=300)
    first = tmp_path / "first_prompts.txt"
    first.write_text("Once upon a time, near the sea\ndef fibonacci(n):\n")
    recording = {
        "WORKER_ENGINE_OPTIONS": '{"expert_distribution_recorder_mode": "stat"}',
        "WORKER_FIRST_PROMPTS": str(first),
    }
    with running_engines(tmp_path, model=model, environ=recording) as engines:
        yield engines


async def test_a_mixture_of_experts_under_a_pair_says_what_one_engine_says(experts):
    engines = experts
    async with client_of(engines) as client:
        # What the first prompts hit is known before anybody has asked anything.
        pair_roles = ("prefill", "decode")
        assert all([sum(await hits_of(client.leaders[role])) for role in pair_roles])
        told = {role: len(client.leaders[role].of("expert_hits")) for role in pair_roles}
        alone = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
        pair = [(await client.pair(prompt, **GREEDY))[1] for prompt in engines.prompts]
        engines.faults.write_text("drop_kv")
        hits = {role: await hits_of(client.leaders[role], after=told[role]) for role in pair_roles}
        broken = [(await client.pair(p, cache_salt="dropped", **GREEDY))[1] for p in engines.prompts]
    assert [answer.ids for answer in pair] == [answer.ids for answer in alone]
    assert len({tuple(answer.ids) for answer in alone}) == len(engines.prompts)
    assert all(without.ids != answer.ids for without, answer in zip(broken, alone, strict=True))
    for role, counts in hits.items():
        assert len(counts) == LAYERS * EXPERTS
        layers = [sum(counts[:EXPERTS]), sum(counts[EXPERTS:])]
        assert layers[0] == layers[1] > 0, role  # every token hits as many experts of each layer
        assert layers[0] % EXPERTS_PER_TOKEN == 0
        assert imbalance(counts, EXPERTS) > 1  # random weights are not even
    assert 0 < distance(hits["prefill"], hits["decode"], EXPERTS) < 1


async def hits_of(leader: Leader, *, after: int = 0) -> list[int]:
    """The first hits that a worker tells of after so many reports."""
    await leader.until(lambda: len(leader.of("expert_hits")) > after)
    report = leader.of("expert_hits")[after]
    assert report.experts == EXPERTS
    return unpack_ids(report.tokens)
