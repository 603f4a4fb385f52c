"""The description at `/schema` is true: schemathesis asks what it allows, and gets what it promises."""

import asyncio
import json

import httpx
import pytest

from tests.conformance.foreign import clients_folder
from tests.processes import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SCHEMATHESIS_S = 300.0


async def test_schemathesis_finds_no_server_error_and_no_undescribed_answer(stack: Stack, tmp_path):
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    argv = [
        str(clients_folder() / "bin" / "schemathesis"),
        "run",
        f"{stack.url}/schema/openapi.json",
        "--header",
        f"Authorization: Bearer {stack.api_key}",
        "--checks",
        checks,
        "--phases",
        "examples,fuzzing",
        "--max-examples",
        "12",
        "--seed",
        "1",
        "--request-timeout",
        "30",
        "--exclude-path-regex",
        "^/(metrics|admin|portal)",
        "--generation-database",
        "none",
        "--suppress-health-check",
        "all",
        "--no-color",
    ]
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(SCHEMATHESIS_S):
            stdout, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, stdout.decode()[-12_000:]


async def test_every_operation_has_an_id_of_its_own_and_a_summary(stack: Stack):
    async with httpx.AsyncClient(base_url=stack.url) as client:
        described = json.loads((await client.get("/schema/openapi.json")).text)
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(ids) == len(set(ids))
    assert all(operation.get("summary") for operation in operations.values())
    expected = {
        "POST /v1/chat/completions": "createChatCompletion",
        "POST /v1/completions": "createCompletion",
        "POST /v1/responses": "createResponse",
        "GET /v1/responses/{response_id}": "getResponse",
        "POST /v1/responses/{response_id}/cancel": "cancelResponse",
        "POST /v1/messages": "createMessage",
        "POST /v1/messages/count_tokens": "countMessageTokens",
        "POST /v1/tokenize": "tokenize",
        "POST /v1/detokenize": "detokenize",
        "POST /v1/files": "createFile",
        "GET /v1/files/{file_id}/content": "getFileContent",
        "POST /v1/batches": "createBatch",
        "POST /v1/batches/{batch_id}/cancel": "cancelBatch",
        "GET /v1/models": "listModels",
    }
    assert {name: operations[name]["operationId"] for name in expected} == expected
