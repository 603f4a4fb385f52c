"""SGLang's record of which experts tokens hit: taken every `PERIOD_S`, summed over its steps.

SGLang writes its record to a file and begins another; where it balances experts by itself (EPLB) the record is its own,
and this module is not used.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import structlog

log = structlog.get_logger()

FOLDER_VARIABLE: Final = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
PERIOD_S: Final = 10.0
BEGIN_WITHIN_S: Final = 60.0
Tell = Callable[[int, Sequence[int]], None]
"""Takes the number of experts of a layer, and the hits of all layers, one after the other."""


def records(server_args: Any) -> bool:
    """Return whether SGLang was started so that there is a record to take."""
    return server_args.expert_distribution_recorder_mode == "stat" and not server_args.enable_eplb


class ExpertFeed:
    """Takes the record of one engine. `begin`, then `run` until cancelled."""

    def __init__(self, folder: Path, tell: Tell, *, load: Callable[[Path], Any]) -> None:
        """`load`: torch.load, which only the engine's environment has."""
        self._folder = folder
        self._load = load
        self._tell = tell

    async def begin(self, tokenizer_manager: Any) -> None:
        """Begin to record, before the first token. Raises TimeoutError when the engine does not answer."""
        async with asyncio.timeout(BEGIN_WITHIN_S):
            await tokenizer_manager.start_expert_distribution_record()

    async def run(self, tokenizer_manager: Any) -> None:
        """Tell of what is recorded."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="experts") as reading:
            while True:
                await asyncio.sleep(PERIOD_S)
                await tokenizer_manager.dump_expert_distribution_record()
                for experts, hits in await loop.run_in_executor(reading, self._read):
                    self._tell(experts, hits)

    def _read(self) -> list[tuple[int, Sequence[int]]]:
        found: list[tuple[int, Sequence[int]]] = []
        for file in sorted(self._folder.glob("*.pt")):
            counts = self._load(file)["logical_count"].sum(dim=0)  # (steps, layers, experts)
            file.unlink()
            if counts.any():
                found.append((int(counts.shape[1]), [int(count) for count in counts.flatten()]))
        return found
