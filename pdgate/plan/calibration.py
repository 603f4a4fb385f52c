"""The shipped factors moved towards a few measurements of the user's own system.

The file is CSV with the columns `gpus` (of the measured worker), `concurrency`, `prompt_tokens`, `output_tokens` and
`tpot_ms`; `attention_dp` and `ttft_ms` may follow. TTFT of rows with one request at once sets the front latency.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from contracts.roofline import Accelerator, Deployment, Efficiency, ModelShape
from pdgate.plan.fit import ENGINES, Coefficients, calibrate, efficiency, prefill_features
from pdgate.plan.least_squares import predict
from pdgate.plan.measured import Measured
from pdgate.plan.workload import WorkloadError, mean, percentile

LEAST = 3  # measurements; at the lowest, a middle and the highest concurrency
COLUMNS = ("gpus", "concurrency", "prompt_tokens", "output_tokens", "tpot_ms")


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """How well a calibration does; errors of TPOT, 0.1 = 10 %."""

    runs: int
    before: float  # of the factors as they were
    after: float  # on each measurement, by a calibration on the others


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpus: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    tpot_ms: float
    attention_dp: int = 1
    ttft_ms: float | None = None


def read_measurements(
    file: Path, *, shape: ModelShape, gpu: Accelerator, weights: str, kv: str, engine: str
) -> list[Measured]:
    """Return the user's measurements of a model on a GPU.

    Raises:
        WorkloadError: unreadable, a wrong column or value (with its line), or fewer than three rows.
    """
    rows = []
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for number, raw in enumerate(csv.DictReader(lines), start=2):
                given = {key: value for key, value in raw.items() if value not in ("", None)}
                try:
                    row = msgspec.convert(given, _Row, strict=False)
                except msgspec.ValidationError as error:
                    raise WorkloadError(f"{file}:{number}: {error}") from None
                if min(row.gpus, row.concurrency, row.prompt_tokens, row.output_tokens, row.tpot_ms) <= 0:
                    raise WorkloadError(f"{file}:{number}: {', '.join(COLUMNS)} must be above zero")
                rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{file}: {error}") from None
    if len(rows) < LEAST:
        raise WorkloadError(f"{file}: {len(rows)} measurements; at least {LEAST} are needed")
    return [
        Measured(
            shape=shape,
            gpu=gpu,
            use=Deployment(gpus=row.gpus, attention_dp=row.attention_dp, weights=weights, kv=kv),
            engine=engine,
            version="",
            concurrency=row.concurrency,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            ttft_ms=row.ttft_ms or 0.0,
            tpot_ms=row.tpot_ms,
        )
        for row in rows
    ]


def calibrated(fit: Efficiency, rows: Sequence[Measured]) -> Efficiency:
    """Return the factors moved towards the measurements: one scale for TPOT, then each factor within +-50 %."""
    moved = calibrate(_coefficients(fit), rows)
    found = efficiency(moved, (fit.transfer_fixed_ms, 1 / fit.transfer_share))
    alone = [r for r in rows if r.concurrency == 1 and r.ttft_ms > 0]
    if not alone:
        return found
    compute = moved.prefill[: -len(ENGINES)]
    fronts = sorted(max(0.0, r.ttft_ms - predict(compute, prefill_features(r)[: len(compute)])) for r in alone)
    front_ms = {**fit.front_ms, alone[0].engine: percentile(fronts, 0.5)}
    return msgspec.structs.replace(found, front_ms=front_ms)


def calibration_of(fit: Efficiency, rows: Sequence[Measured]) -> Calibration:
    """Return the errors before and after, each measurement predicted without itself."""
    prior = _coefficients(fit)
    others = [[*rows[:i], *rows[i + 1 :]] for i in range(len(rows))]
    return Calibration(
        runs=len(rows),
        before=mean([abs(prior.tpot_ms(row) / row.tpot_ms - 1) for row in rows]),
        after=mean(
            [abs(calibrate(prior, rest).tpot_ms(row) / row.tpot_ms - 1) for row, rest in zip(rows, others, strict=True)]
        ),
    )


def _coefficients(fit: Efficiency) -> Coefficients:
    """The factors in the order that the fit's features have."""
    return Coefficients(
        prefill=(
            fit.prefill_dense,
            fit.prefill_moe,
            fit.prefill_attention,
            fit.prefill_weights,
            fit.prefill_links,
            *(fit.front_ms.get(engine, 0.0) for engine in ENGINES),
        ),
        decode=(
            fit.weights,
            fit.experts,
            fit.kv,
            fit.compute,
            fit.attention,
            fit.links,
            fit.layer_ms,
            fit.moe_layer_ms,
            fit.request_ms,
            fit.mixed_prefill,
        ),
        work=(fit.work_dense, fit.work_moe),
    )
