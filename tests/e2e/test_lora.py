"""A LoRA adapter by its model's name, under a pair: what the model with the adapter merged into its weights says."""

import subprocess
from pathlib import Path

import openai
import pytest

from tests.engines import Engines, catalogue_entry, running_engines, tiny_model
from tests.processes import REPOSITORY, Stack, engine_python

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(800)]

QUESTIONS = ("What is the capital of France?", "The quick brown fox jumps over", "def fibonacci(n):")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory):
    """A pair with the adapter `tuned`, and a unified worker whose model has it merged in."""
    folder: Path = tmp_path_factory.mktemp("lora")
    script = REPOSITORY / "tests/e2e/lora_files.py"
    subprocess.run([engine_python(), script, tiny_model(), folder], check=True, timeout=300)
    entry = catalogue_entry("tuned", 'pool = "tiny"', f'adapter = "{folder / "adapter"}"')
    with running_engines(folder, reference=folder / "merged", further_models=entry) as workers:
        yield workers


async def test_an_adapter_under_a_pair_says_what_the_merged_model_says(real_stack: Stack, engines: Engines):
    async with openai.AsyncOpenAI(
        base_url=f"{real_stack.url}/v1", api_key=real_stack.api_key, max_retries=0, timeout=240
    ) as client:

        async def ask(model: str, question: str) -> str:
            answer = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=24
            )
            return answer.choices[0].message.content

        names = {model.id async for model in await client.models.list()}
        texts = {name: [await ask(name, question) for question in QUESTIONS] for name in ("tiny", "tuned", "reference")}
        again = [await ask("tiny", question) for question in QUESTIONS]
    assert {"tiny", "tuned"} <= names
    assert texts["tuned"] == texts["reference"]
    assert all(base != tuned for base, tuned in zip(texts["tiny"], texts["tuned"], strict=True))
    assert again == texts["tiny"]  # the adapter's prefixes are not the base model's
