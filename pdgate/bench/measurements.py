"""Measurements of a run in the form that `pdgate plan --measured` reads."""

import csv
from pathlib import Path

from pdgate.bench.records import Run
from pdgate.plan.calibration import COLUMNS, LEAST
from pdgate.plan.workload import mean, percentile


class FitError(ValueError):
    """The run gives no measurements; the message says why."""


def write_measurements(file: Path, run: Run, *, gpus: int) -> None:
    """Write one row per step of a closed loop: the medians of TPOT and TTFT at its concurrency.

    Args:
        file: CSV to write.
        run: closed loops at three or more concurrencies.
        gpus: of one worker.

    Raises:
        FitError: fewer than three closed loops, or one without answers of two tokens.
        OSError: cannot be written.
    """
    rows = []
    for step in run.steps:
        if step.concurrency is None or step.client.invalid_because:
            continue
        whole = [record for record in step.records if record.error is None]
        tpot_ms = sorted(value for record in whole if (value := record.tpot_ms) is not None)
        ttft_ms = sorted(value for record in whole if (value := record.ttft_ms) is not None)
        if not tpot_ms:
            raise FitError(f"--fit: {step.name} has no answer of two tokens or more")
        prompt = mean([r.prompt_tokens if r.prompt_tokens is not None else r.asked_prompt_tokens for r in whole])
        output = mean([record.output_tokens for record in whole])
        rows.append(
            (
                *(gpus, step.concurrency, round(prompt), round(output), round(percentile(tpot_ms, 0.5), 4)),
                round(percentile(ttft_ms, 0.5), 3),
            )
        )
    if len({row[1] for row in rows}) < LEAST:
        raise FitError(f"--fit: {len(rows)} valid closed loops; give {LEAST} concurrencies, as in --concurrency 1,8,64")
    with file.open("w", encoding="utf-8", newline="") as out:
        lines = csv.writer(out)
        lines.writerow((*COLUMNS, "ttft_ms"))
        lines.writerows(rows)
