"""A tiny Qwen3-MoE under a pair: what one engine says, and only with the KV cache."""

import subprocess

import pytest

from tests.engines import running_engines, tiny_model
from tests.processes import REPOSITORY, engine_python
from tests.workers.engine_client import client_of

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(800)]

GREEDY = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture
def experts(tmp_path):
    """Three workers with the model."""
    model = tmp_path / "model"
    script = REPOSITORY / "tests/e2e/moe_files.py"
    subprocess.run([engine_python(), script, tiny_model(), model], check=True, timeout=300)
    with running_engines(tmp_path, model=model) as engines:
        yield engines


async def test_a_mixture_of_experts_under_a_pair_says_what_one_engine_says(experts):
    engines = experts
    async with client_of(engines) as client:
        alone = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
        pair = [(await client.pair(prompt, **GREEDY))[1] for prompt in engines.prompts]
        engines.faults.write_text("drop_kv")
        broken = [(await client.pair(p, cache_salt="dropped", **GREEDY))[1] for p in engines.prompts]
    assert [answer.ids for answer in pair] == [answer.ids for answer in alone]
    assert len({tuple(answer.ids) for answer in alone}) == len(engines.prompts)
    assert all(without.ids != answer.ids for without, answer in zip(broken, alone, strict=True))
