"""The gain of a split as measured, beside the planner's prediction for the same systems.

`python -m benches.plan_pairs`. For a model, GPU, engine, format and lengths that were measured both aggregated and
disaggregated, and a TPOT target, the measured goodput per GPU is that of the best run within the target,
`concurrency / (TTFT + (O - 1)*TPOT)` over its GPUs. The prediction takes the same deployments, with the factors of a
fit that saw neither this model and GPU nor any disaggregated run; a second one is calibrated on three aggregated runs
of the system, as a user can do. Questions of one system are not independent: the number of systems is given too.
"""

import csv
import itertools
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benches.plan_agreement import wilson
from contracts.roofline import Accelerator, Deployment, ModelShape, decode_terms, prefill_terms
from pdgate.plan.decide import WORTH
from pdgate.plan.fit import ENGINES, Coefficients, calibrate, decode_columns, fit
from pdgate.plan.hardware import accelerators, find_accelerator
from pdgate.plan.least_squares import predict
from pdgate.plan.measured import DATA, Measured, read_silicon
from pdgate.plan.models import known_models
from pdgate.plan.workload import mean, percentile

PAIRS = DATA / "silicon_disaggregated.csv.xz"
RESULTS = Path(__file__).parent / "results" / "plan_pairs.json"
TARGETS_MS = (8.0, 10.0, 12.5, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0)
MIN_RUNS = 3  # of either kind within the system
WEIGHTS = 3  # place of the weights' pass among the terms of a prompt


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role."""

    workers: int
    use: Deployment

    @property
    def gpus(self) -> int:
        return self.workers * self.use.gpus


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One disaggregated run."""

    shape: ModelShape
    gpu: Accelerator
    engine: str
    weights: str
    prefill: Pool
    decode: Pool
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float

    @property
    def system(self) -> tuple[str, ...]:
        return _system(self.shape, self.gpu, self.engine, self.weights, self.prompt_tokens, self.output_tokens)

    @property
    def gpus(self) -> int:
        return self.prefill.gpus + self.decode.gpus


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """TPOT and goodput per GPU of one deployment at one concurrency, measured and predicted."""

    tpot_ms: float
    rps_per_gpu: float
    predicted_tpot_ms: float
    predicted_rps_per_gpu: float


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One system at one TPOT target. None = no run within the target."""

    system: str
    tpot_ms: float
    measured: float
    predicted: float | None
    measured_tokens: tuple[float, float]  # answer tokens per second and GPU of the best aggregated and split runs


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole comparison. Shares are 0 to 1 with their 95 % interval."""

    systems: int
    questions: list[Question]
    same_rule: tuple[int, int, float, float]  # hits, n, low, high: "a split gains 30 %"
    same_winner: tuple[int, int, float, float]
    gain_error_points: float  # median absolute difference of the gains, percentage points
    split_runs: int
    split_tpot_mape: float
    split_tpot_median: float


def read_splits(file: Path = PAIRS) -> list[Split]:
    """Return the disaggregated runs whose numbers of workers are known."""
    models, gpus = known_models(), accelerators()
    with lzma.open(file, "rt", encoding="utf-8", newline="") as lines:
        return [
            _split(row, models[row["model_path"].lower()].shape, find_accelerator(row["system"].split("_")[0], gpus))
            for row in csv.DictReader(lines)
        ]


def compare(*, calibrated: bool = False) -> Report:
    """Return measured and predicted gains of every system measured both ways.

    Args:
        calibrated: on three aggregated runs of each system (the fewest, a middle and the most requests at once).
    """
    splits = read_splits()
    rows, _ = read_silicon()
    groups = sorted({f"{s.shape.name} on {s.gpu.name}" for s in splits})
    fits = {group: fit([r for r in rows if r.group != group]) for group in groups}
    own: dict[tuple[str, ...], Coefficients] = {}
    for split in splits:
        own[split.system[:3]] = fits[split.system[0]]
    if calibrated:
        for key, prior in own.items():
            known = sorted(
                (r for r in rows if (r.group, r.engine, r.use.weights) == key),
                key=lambda r: (r.concurrency, r.prompt_tokens),
            )
            if len(known) >= MIN_RUNS:
                own[key] = calibrate(prior, [known[0], known[len(known) // 2], known[-1]])
    both: dict[tuple[str, ...], tuple[list[Point], list[Point]]] = defaultdict(lambda: ([], []))
    errors = []
    for split in splits:
        point = _split_point(split, own[split.system[:3]])
        errors.append(abs(point.predicted_tpot_ms / split.tpot_ms - 1))
        both[split.system][1].append(point)
    for row in rows:
        key = _system(row.shape, row.gpu, row.engine, row.use.weights, row.prompt_tokens, row.output_tokens)
        if key in both:
            both[key][0].append(_unified_point(row, own[key[:3]]))
    usable = {key: pair for key, pair in both.items() if min(map(len, pair)) >= MIN_RUNS}
    questions = [q for key, pair in sorted(usable.items()) for q in _questions(" ".join(key), *pair)]
    rule = [_pays(q.measured) == _pays(q.predicted) for q in questions]
    winner = [(q.measured > 0) == (q.predicted is not None and q.predicted > 0) for q in questions]
    apart = sorted(abs(q.measured - q.predicted) for q in questions if q.predicted is not None)
    return Report(
        systems=len({q.system for q in questions}),
        questions=questions,
        same_rule=_share(rule),
        same_winner=_share(winner),
        gain_error_points=100 * percentile(apart, 0.5),
        split_runs=len(splits),
        split_tpot_mape=mean(errors),
        split_tpot_median=percentile(sorted(errors), 0.5),
    )


def main() -> None:
    """Print the tables and write the results."""
    found = {"never seen": compare(), "three runs calibrated": compare(calibrated=True)}
    for name, report in found.items():
        print(f"== {name}")
        _print(report)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print(f"written to {RESULTS.name}", file=sys.stderr)


def _print(report: Report) -> None:
    for system, questions in itertools.groupby(report.questions, key=lambda q: q.system):
        print(system)
        for q in questions:
            said = "no deployment within the target" if q.predicted is None else f"{q.predicted:+.0%}"
            print(f"  TPOT <= {q.tpot_ms:g} ms: measured {q.measured:+.0%}, predicted {said}")
    answers = {"a split gains 30 %": report.same_rule, "which is better": report.same_winner}
    for name, (hits, n, low, high) in answers.items():
        print(f"same answer to {name!r}: {hits} of {n} = {hits / n:.0%} ({low:.0%} to {high:.0%})")
    print(f"systems: {report.systems}; gains differ by {report.gain_error_points:.0f} points in the median")
    print(
        f"TPOT of {report.split_runs} disaggregated runs: MAPE {report.split_tpot_mape:.1%}, median "
        f"{report.split_tpot_median:.1%}"
    )


def _questions(system: str, unified: Sequence[Point], split: Sequence[Point]) -> Iterator[Question]:
    """Questions at which both ways have a measured run within the target, where the best runs change."""
    last: tuple[float, float] | None = None
    for target in TARGETS_MS:
        one, two = (max((p.rps_per_gpu for p in ps if p.tpot_ms <= target), default=0.0) for ps in (unified, split))
        if not one or not two or (one, two) == last:
            continue
        last = one, two
        ours = [
            max((p.predicted_rps_per_gpu for p in ps if p.predicted_tpot_ms <= target), default=0.0)
            for ps in (unified, split)
        ]
        predicted = ours[1] / ours[0] - 1 if ours[0] else (math.inf if ours[1] else None)
        if predicted is not None and math.isinf(predicted):
            predicted = 9.99  # only the split keeps the target
        tokens = int(system.rpartition("/")[2])
        yield Question(
            system=system,
            tpot_ms=target,
            measured=two / one - 1,
            predicted=predicted,
            measured_tokens=(one * tokens, two * tokens),
        )


def _share(answers: Sequence[bool]) -> tuple[int, int, float, float]:
    return sum(answers), len(answers), *wilson(sum(answers), len(answers))


def _pays(gain: float | None) -> bool:
    return gain is not None and gain >= WORTH


def _unified_point(row: Measured, found: Coefficients) -> Point:
    tpot_ms = found.tpot_ms(row)
    alone_ms = predict(found.prefill, _prefill_row(row.shape, row.gpu, row.use, row.prompt_tokens, row.engine))
    steps = row.output_tokens - 1
    return Point(
        tpot_ms=row.tpot_ms,
        rps_per_gpu=1000 * row.concurrency / (row.ttft_ms + steps * row.tpot_ms) / row.use.gpus,
        predicted_tpot_ms=tpot_ms,
        predicted_rps_per_gpu=1000 * row.concurrency / (alone_ms + steps * tpot_ms) / row.use.gpus,
    )


def _split_point(row: Split, found: Coefficients) -> Point:
    """A closed loop over both pools: those that wait for prefill do not decode."""
    prefill_ms = predict(
        found.prefill, _prefill_row(row.shape, row.gpu, row.prefill.use, row.prompt_tokens, row.engine)
    )
    busy_ms = _busy_ms(row, found)
    steps = row.output_tokens - 1
    low, high = 0.0, row.prefill.workers / busy_ms  # requests per ms
    for _ in range(50):
        rate = (low + high) / 2
        needed = rate * (prefill_ms + steps * _step_ms(row, found, rate, steps))
        low, high = (rate, high) if needed < row.concurrency else (low, rate)
    return Point(
        tpot_ms=row.tpot_ms,
        rps_per_gpu=1000 * row.concurrency / (row.ttft_ms + steps * row.tpot_ms) / row.gpus,
        predicted_tpot_ms=_step_ms(row, found, low, steps),
        predicted_rps_per_gpu=1000 * low / row.gpus,
    )


def _busy_ms(row: Split, found: Coefficients) -> float:
    """What a prompt takes of a busy prefill worker. The front latency is waiting: it does not bound the pool's rate."""
    terms = _prefill_row(row.shape, row.gpu, row.prefill.use, row.prompt_tokens, row.engine)
    weights = found.prefill[WEIGHTS] * terms[WEIGHTS]
    tokens_ms = predict(found.prefill, [*terms[: -len(ENGINES)], *[0.0] * len(ENGINES)]) - weights
    work = min(1.0, found.work[bool(row.shape.experts)])
    return max(1e-9, work * tokens_ms + weights)


def _step_ms(row: Split, found: Coefficients, rate: float, steps: int) -> float:
    """The decode step at so many requests per ms: the batch is what arrives during an answer."""
    batch = 1.0
    step_ms = 0.0
    for _ in range(40):
        terms = decode_terms(
            row.shape,
            row.gpu,
            row.decode.use,
            requests=batch,
            kv_tokens=batch * (row.prompt_tokens + row.output_tokens / 2),
        )
        step_ms = predict(found.decode, [*decode_columns(terms), 0.0])
        wanted = min(rate * steps * step_ms, float(row.concurrency)) / row.decode.workers
        batch = max(1.0, (batch + wanted) / 2)
    return step_ms


def _prefill_row(shape: ModelShape, gpu: Accelerator, use: Deployment, tokens: int, engine: str) -> list[float]:
    terms = prefill_terms(shape, gpu, use, uncached_tokens=tokens)
    return [
        terms.compute_ms,
        terms.moe_compute_ms,
        terms.attention_ms,
        terms.weights_ms,
        terms.links_ms,
        *(float(engine == e) for e in ENGINES),
    ]


def _system(
    shape: ModelShape, gpu: Accelerator, engine: str, weights: str, prompt: int, output: int
) -> tuple[str, ...]:
    return f"{shape.name} on {gpu.name}", engine, weights, f"{prompt}/{output}"


def _split(row: dict[str, str], shape: ModelShape, gpu: Accelerator) -> Split:
    cache = "fp8" if row["backend"] == "trtllm" and row["precision"] in ("fp8", "fp4") else "bf16"

    def pool(role: str) -> Pool:
        tensor, ranks = int(row[f"{role}_tp_size"]), int(row[f"{role}_attention_dp_size"])
        use = Deployment(gpus=tensor * ranks, attention_dp=ranks, weights=row["precision"], kv=cache)
        return Pool(workers=int(row[f"{role}_num_workers"]), use=use)

    return Split(
        shape=shape,
        gpu=gpu,
        engine=row["backend"],
        weights=row["precision"],
        prefill=pool("prefill"),
        decode=pool("decode"),
        concurrency=int(row["concurrency"]),
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


if __name__ == "__main__":
    main()
