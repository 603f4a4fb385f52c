"""Tools and structured outputs by foreign clients, over the real engine: grammars and parsers are the engine's own."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.foreign import run_client
from tests.engines import Engines
from tests.processes import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
async def real_stack(engines: Engines, database_url: str) -> AsyncIterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-real-"))
    stack = Stack(
        folder=folder,
        redis_url=engines.redis_url,
        database_url=database_url,
        catalog_file=engines.catalog_file,
        models_dir=engines.models_dir,
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler(cpu_profile=True)
    stack.start()
    try:
        await stack.ready(timeout_s=90)
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def test_python_clients_call_tools_and_get_what_their_schemas_say(real_stack: Stack):
    seen = await run_client(real_stack, "structured_client.py")
    assert seen["instructor TOOLS"]  # its default, without `strict`
    assert seen["instructor TOOLS_STRICT"]
    assert seen["instructor JSON_SCHEMA"]
    assert seen["anthropic"] == {"stop": ["tool_use", "tool_use"], "call": True, "after": "max_tokens"}
    assert seen["responses"] == {
        "call": True,
        "follow": "incomplete",
        "stream": True,
        "last": "response.completed",
        "parsed": True,
    }
    assert seen["langchain function_calling"]
    assert seen["langchain json_schema"]
    assert seen["litellm"]


async def test_vercels_ai_sdk_calls_tools_and_gets_objects(real_stack: Stack):
    seen = await run_client(real_stack, "ai_sdk_structured.mjs")
    for name, one in seen.items():
        assert (one["tool"], one["input"], one["finish"]) == ("weather", True, "tool-calls"), name
        assert one.get("object", True), name
