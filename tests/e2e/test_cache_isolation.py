"""Nobody finds out by the prompt cache what another organisation asked: by counts, not by clocks."""

import httpx
import pytest

from tests.processes import Stack

pytestmark = pytest.mark.e2e

PROMPT = "the same long question of two organisations " * 12


async def asked(stack: Stack, key: str) -> tuple[int, int]:
    """Ask once; return prompt tokens and how many of them were found cached, as told to the client."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
        answer = await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_prompt_that_another_organisation_has_cached_is_computed_anew(stack: Stack):
    stack.start()
    await stack.ready()
    first = stack.api_key
    await stack.seed()  # another organisation
    second = stack.api_key
    tokens, cold = await asked(stack, first)
    _, warm = await asked(stack, first)
    _, foreign = await asked(stack, second)
    _, own = await asked(stack, second)
    assert cold == 0
    assert tokens / 2 < warm < tokens  # the tenant itself has the gain
    assert foreign == 0  # every token of the other's prefill is computed: nothing to be measured, in time either
    assert own == warm
