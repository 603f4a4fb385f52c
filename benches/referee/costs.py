"""What the mocker's workers cost, by measured rows: what an operator states before the policy is let loose.

One prefill and one decode worker play single prompts of many lengths, then a burst. Computing times of prompts and
times of decode steps go through the same fit that corrects them in production (`scheduler.policy.fit`).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benches.referee.finished import Asked
from contracts.perf import DEFAULT_LATENCY, LatencyModel, TransferCost
from scheduler.policy.fit import LatencyFit

_PROMPTS = (128, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 65_536)
_APART_S = 5.0
_BURST = 240
_TICK_MS = 50.0
_TIMES = 20  # that each row is shown: the fit begins at a guess and is to end at the rows


def calibration() -> list[Asked]:
    """Return the requests that are played: one at a time, then a burst that fills decode batches."""
    alone = [Asked(number, number * _APART_S, prompt, 60) for number, prompt in enumerate(_PROMPTS)]
    begins_s = len(alone) * _APART_S
    burst = [
        Asked(len(alone) + number, begins_s + 0.05 * number, 400 + 37 * (number % 60), 500) for number in range(_BURST)
    ]
    return alone + burst


class StepWatch:
    """A scaling policy that changes nothing and keeps what decode steps took."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float]] = []
        """Requests, their KV tokens, ms."""

    def initial_tick_ms(self) -> float:
        """Return when the first tick is."""
        return _TICK_MS

    def on_tick(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """Take the latest step of the decode worker."""
        for row in snapshot["decode_fpm_snapshots"]:
            if row["num_decode_requests"] and not row["num_prefill_requests"] and row["wall_time"] > 0:
                self.steps.append((row["num_decode_requests"], row["sum_decode_kv_tokens"], 1000 * row["wall_time"]))
        return {"target_prefill": None, "target_decode": None, "next_tick_ms": snapshot["now_ms"] + _TICK_MS}


def fitted(rows: Sequence[Mapping[str, Any]], steps: Sequence[tuple[int, int, float]]) -> LatencyModel:
    """Return the costs of measured requests and steps. The mocker sends KV in no time.

    Args:
        rows: the mocker's report of the calibration; those that ran alone tell a prompt's computing time.
        steps: requests, their KV tokens and ms of decode steps.
    """
    fit = LatencyFit(DEFAULT_LATENCY, stated=False)
    alone = [
        (row["input_length"], row["source_held_ms"] - row["prefill_admit_ms"])
        for row in rows
        if row["arrival_time_ms"] < len(_PROMPTS) * _APART_S * 1000
    ]
    for (prompt, ms), _ in itertools.product(alone, range(_TIMES)):
        fit.prompt(uncached_tokens=prompt, cached_tokens=0, compute_ms=ms)
    for requests, kv_tokens, ms in steps:
        fit.step(num_requests=requests, kv_tokens=kv_tokens, step_ms=ms)
    model = fit.model
    return LatencyModel(
        prefill=model.prefill,
        decode=model.decode,
        transfer=TransferCost(fixed_ms=0.0, bytes_per_ms=1e12, kv_bytes_per_token=1),
        kv_capacity_tokens=0,  # each worker says its own
    )
