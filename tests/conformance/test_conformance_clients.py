"""Clients that people use, as they are, against the whole stack with timed workers."""

import sys

import pytest

from tests.conformance.foreign import run_client
from tests.processes import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RESPONSE_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",  # cut by max_output_tokens
]


@pytest.mark.parametrize("environment", ["newest", "pinned by others"])
async def test_openai_python(stack: Stack, environment: str):
    python = sys.executable if environment == "newest" else None
    seen = await run_client(stack, "openai_client.py", python=python)
    chat, stream = seen["chat"], seen["stream"]
    assert (chat["finish"], chat["tokens"], chat["total"]) == ("length", 5, 5)
    assert chat["text"]
    assert (stream["role"], stream["text"], stream["finish"]) == ("assistant", chat["text"], ["length"])
    assert (stream["usage"], stream["empty"]) == ([5], 1)
    assert (seen["samples"], seen["helper"]) == ([0, 1], "length")
    assert seen["completion"] == {"choices": [0, 1], "echo": True, "tokens": 8}
    assert seen["completion_stream"] == "length"
    assert seen["response"] == {"text": chat["text"], "status": "incomplete", "tokens": 5, "again": True}
    assert seen["follow"]
    assert seen["response_stream"] == {"types": RESPONSE_EVENTS, "numbers": True, "text": chat["text"]}
    assert seen["cancelled"] == "cancelled"
    assert seen["deleted"][:2] == ["NotFoundError", 404]
    assert (seen["models"], seen["model"]) == (["tiny"], "tiny")
    assert seen["batch"] == ["completed", 1, "a"]
    assert seen["files"] == ["batch", "batch_output"]
    assert seen["file_deleted"]
    errors = seen["errors"]
    assert errors["key"][:3] == ["AuthenticationError", 401, "invalid_api_key"]
    assert errors["model"] == ["NotFoundError", 404, "model_not_found", "model"]
    assert errors["param"] == ["BadRequestError", 400, "invalid_request", "temperature"]
    assert errors["context"] == ["BadRequestError", 400, "context_length_exceeded", "prompt"]
    assert errors["picture"][:2] == ["BadRequestError", 400]
    for what in ("embedding", "image", "audio"):
        assert errors[what][:2] == ["NotFoundError", 404], what


async def test_anthropic_python(stack: Stack):
    seen = await run_client(stack, "anthropic_client.py")
    assert seen["message"]["text"]
    assert (seen["message"]["stop"], seen["message"]["tokens"]) == ("max_tokens", 5)
    assert seen["message"]["request_id"]
    stream = seen["stream"]
    assert (stream["text"], stream["same"], stream["stop"], stream["tokens"]) == (
        seen["message"]["text"],
        True,
        "max_tokens",
        5,
    )
    assert stream["input"] == seen["counted"]
    assert seen["events"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert seen["errors"] == {
        "key": ["AuthenticationError", 401, "authentication_error", True],
        "model": ["NotFoundError", 404, "not_found_error", True],
        "picture": ["BadRequestError", 400, "invalid_request_error", True],
    }


async def test_litellm_over_both_forms(stack: Stack):
    seen = await run_client(stack, "litellm_client.py")
    for form in ("openai", "anthropic"):
        one = seen[form]
        assert one["text"], form
        assert one["streamed"] == one["text"]
        assert (one["finish"], one["tokens"], one["streamed_tokens"]) == ("length", 5, 5)
    assert seen["text_completion"] == 4
    assert seen["too_long"] == 400


async def test_langchain(stack: Stack):
    seen = await run_client(stack, "langchain_client.py")
    assert seen["text"]
    assert seen["streamed"] == seen["responses_streamed"] == seen["text"]
    assert (seen["tokens"], seen["streamed_tokens"], seen["finish"]) == (5, 5, "length")
    assert seen["batch"] == [5, 5, 5]
    assert seen["responses"] == 5
    assert seen["completion"]


async def test_openai_node(stack: Stack):
    seen = await run_client(stack, "openai_node.mjs")
    assert seen["text"]
    assert seen["streamed"] == seen["response"] == seen["text"]
    assert (seen["tokens"], seen["streamed_tokens"], seen["completion"]) == (5, 5, 4)
    assert seen["events"] == RESPONSE_EVENTS
    assert (seen["file"], seen["models"]) == (2, ["tiny"])
    assert seen["errors"]["key"] == ["AuthenticationError", 401, "invalid_api_key"]
    assert seen["errors"]["model"] == ["NotFoundError", 404, "model_not_found"]


async def test_vercels_ai_sdk_over_three_forms(stack: Stack):
    seen = await run_client(stack, "ai_sdk.mjs")
    texts = {one["text"] for one in seen.values()}
    assert len(texts) == 1
    for name, one in seen.items():
        assert one["failure"] is None, (name, one)
        assert one["text"], name
        assert one["streamed"] == one["text"], name
        assert (one["finish"], one["tokens"], one["streamed_tokens"]) == ("length", 5, 5), name
