"""A worker computes its first prompts before it is ready, without a peer, whatever its role."""

import pytest

from contracts.environment import SettingsError
from contracts.lifecycle import Role, WorkerState
from tests.processes import until
from tests.workers.peers import running_worker
from workers.engines.faults import HANG
from workers.first_prompts import FirstPrompts, read_first_prompts


def two_prompts() -> FirstPrompts:
    return FirstPrompts([list(range(1, 20)), list(range(1, 40))])


@pytest.mark.parametrize("role", list(Role))
async def test_a_worker_is_ready_when_it_has_computed_them(role: Role):
    prompts = two_prompts()
    async with running_worker(role, first_prompts=prompts) as worker:
        condition = worker.server.condition
        assert condition.state is WorkerState.STARTING
        await until(lambda: condition.state is WorkerState.READY, 20)
        assert prompts.computed == 2
        assert worker.engine.load().num_running == 0


async def test_a_worker_that_cannot_compute_them_is_never_ready_and_can_be_stopped():
    async with running_worker(Role.UNIFIED, first_prompts=two_prompts()) as worker:
        worker.faults.on.add(HANG)
        condition = worker.server.condition
        await until(lambda: worker.engine.load().num_running or worker.engine.load().num_waiting, 20)
        assert condition.state is WorkerState.STARTING
        await worker.server.drain()
        assert condition.state is WorkerState.STOPPED


def test_the_file_has_a_prompt_a_line_and_the_models_own_tokens(tmp_path, models_dir):
    file = tmp_path / "prompts.txt"
    file.write_text("Tell me of the sea.\n\ndef fibonacci(n):\n")
    assert len(read_first_prompts(str(file), str(models_dir / "tiny"))) == 2
    assert len(read_first_prompts("", "")) == 0


@pytest.mark.parametrize(
    ("text", "model", "why"),
    [
        (None, "tiny", "No such file"),
        ("a prompt", "", "needs the tokenizer"),
        ("a prompt\n" * 1001, "tiny", "at most 1000 prompts"),
    ],
)
def test_what_cannot_be_read_stops_the_worker_by_name(tmp_path, models_dir, text, model, why):
    file = tmp_path / "prompts.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=rf"WORKER_FIRST_PROMPTS: .*{why}"):
        read_first_prompts(str(file), str(models_dir / model) if model else "")
