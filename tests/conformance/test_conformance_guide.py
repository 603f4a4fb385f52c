"""Every example of docs/api.md, run as it stands there, one after the other in one shell."""

import asyncio
import os
import re
from pathlib import Path

import httpx
import pytest

from tests.processes import REPOSITORY, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

PAGE = REPOSITORY / "docs" / "api.md"
EXAMPLE = re.compile(r"(?:<!-- expect: (.*?) -->\n)?```bash\n(.*?)```", re.DOTALL)
SHELL_S = 120.0
END = "===end of example==="


async def test_every_example_of_the_guide_does_what_it_says(stack: Stack, tmp_path: Path):
    examples = EXAMPLE.findall(PAGE.read_text())
    script = "set -euo pipefail\n" + "".join(f"{code}\necho; echo '{END}'\n" for _, code in examples)
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script,
        cwd=tmp_path,
        env={
            **os.environ,
            "PDGATE_URL": stack.url,
            "PDGATE_API_KEY": stack.api_key,
            "PDGATE_MODEL": "tiny",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SHELL_S):
        stdout, stderr = await process.communicate()
    outputs = stdout.decode().split(END)
    assert process.returncode == 0, f"{outputs[-1]}\n{stderr.decode()}"
    for (expected, code), output in zip(examples, outputs, strict=False):
        assert expected in output, f"{code}\n--- printed\n{output}"
    assert len(outputs) == len(examples) + 1


async def test_the_guide_has_an_example_of_every_endpoint_for_tenants(stack: Stack):
    async with httpx.AsyncClient(base_url=stack.url) as client:
        paths = (await client.get("/schema/openapi.json")).json()["paths"]
    text = PAGE.read_text()
    others = ("/admin", "/portal", "/livez", "/readyz", "/metrics", "/v1/organization")
    for path in paths:
        if not path.startswith(others):
            stem = re.sub(r"/\{[^}]*\}.*", "", path)
            assert stem in text, path
