"""Running the foreign clients in their own environment."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.processes import REPOSITORY, Stack

CLIENTS = REPOSITORY / ".clients"
SCRIPTS = Path(__file__).parent / "clients"
CLIENT_S = 150.0


def clients_folder() -> Path:
    """Return the environment of the foreign clients; fail when it was not made."""
    folder = Path(os.environ.get("PDGATE_CLIENTS", CLIENTS))
    if not (folder / ".made").exists():
        raise FileNotFoundError(f"{folder} is missing: run `make .clients/.made`, or set PDGATE_CLIENTS")
    return folder


async def run_client(stack: Stack, script: str, *, model: str = "tiny", python: str | None = None) -> Any:
    """Run one of the scripts against a stack and return what it printed."""
    folder = clients_folder()
    interpreter = python or str(folder / "bin" / "python")
    if script.endswith(".mjs"):
        # Packages are found beside the script that asks for them.
        shutil.copy(SCRIPTS / script, folder / script)
        argv = [_node(folder), str(folder / script)]
    else:
        argv = [interpreter, str(SCRIPTS / script)]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))},
        "PDGATE_URL": stack.url,
        "PDGATE_API_KEY": stack.api_key,
        "PDGATE_MODEL": model,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    process = await asyncio.create_subprocess_exec(
        *argv, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(CLIENT_S):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, f"{stderr.decode()[-4000:]}\n--- gateway\n{stack.log('gateway')[-2000:]}"
    return json.loads(stdout.decode().strip().splitlines()[-1])


def _node(folder: Path) -> str:
    own = folder / "bin" / "node"
    return str(own) if own.exists() else "node"
