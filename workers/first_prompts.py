"""Prompts that a worker computes before it takes requests (`WORKER_FIRST_PROMPTS`).

What an engine learns from its first traffic it then knows already: kernels are compiled, and a mixture's experts have
been counted, by our own record and by SGLang's EPLB, which places them by what it has seen since the engine started.
The prompts should be like those to come, so they are the operator's, one a line. Nobody's cache holds them: tenants'
prompts have salted names.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from contracts.environment import SettingsError
from contracts.lifecycle import Role
from workers.engine import Engine
from workers.trials import Trial, lone_job

log = structlog.get_logger()

WITHIN_S = 120.0
"""Of one prompt: the first one may have kernels compiled."""
NUM_TOKENS = 16
"""Generated for each, where the role generates."""
MOST = 1000


class FirstPrompts:
    """Some prompts, as token ids."""

    def __init__(self, prompts: Sequence[Sequence[int]] = ()) -> None:
        self._prompts = prompts
        self.computed = 0
        """Those that went well."""

    def __len__(self) -> int:
        return len(self._prompts)

    async def run(self, engine: Engine, role: Role) -> None:
        """Compute one after the other, without a peer. One that fails is logged, and the next one comes."""
        began_s = time.monotonic()
        for prompt in self._prompts:
            job = lone_job(role, prompt, max_tokens=NUM_TOKENS, within_s=WITHIN_S)
            if why := await Trial(job).run(engine, within_s=WITHIN_S):
                log.warning("first_prompt_failed", tokens=len(prompt), why=why)
            else:
                self.computed += 1
        log.info("first_prompts", computed=self.computed, of=len(self), s=round(time.monotonic() - began_s, 1))


NO_PROMPTS = FirstPrompts()


def read_first_prompts(file: str, model_path: str) -> FirstPrompts:
    """Return the prompts of a file, made tokens by the model's tokenizer; none without a file.

    Raises:
        SettingsError: the file or `tokenizer.json` is missing, or there are too many prompts.
    """
    if not file:
        return NO_PROMPTS
    try:
        prompts = [line for line in Path(file).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"WORKER_FIRST_PROMPTS: {error}") from None
    if len(prompts) > MOST:
        raise SettingsError(f"WORKER_FIRST_PROMPTS: at most {MOST} prompts, {file} has {len(prompts)}")
    tokens = Path(model_path) / "tokenizer.json"
    if not model_path or not tokens.is_file():
        raise SettingsError(f"WORKER_FIRST_PROMPTS: needs the tokenizer in WORKER_MODEL_PATH, there is no {tokens}")
    tokenizer = Tokenizer.from_file(str(tokens))
    return FirstPrompts([tokenizer.encode(prompt).ids for prompt in prompts])
