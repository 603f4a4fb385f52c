"""Latency measurements as the fit reads them: which rows are kept, and what their labels mean.

The aggregated rows of aiconfigurator's `silicon_sample.csv` need care:

1. Where tensor and expert parallelism are both above one, the table multiplies them (`tp_size` 64 for TP 8 with EP 8):
   the real number of GPUs is read back from the expert columns.
2. `batch_size` is the concurrency divided by the (likewise multiplied) number of attention ranks: the concurrency in
   the source column is used where there is one.
3. One measurement can stand under several labels (DeepSeek-R1 and V3 share one architecture): duplicates go.
4. GB200 rows over more than one node carry an "aggregated" label but no usable parallelism: they go.
5. Rows faster than 100 % of memory bandwidth and FLOP/s allow are mislabelled (most likely prefix hits, speculative
   decoding or a lower real concurrency): they go, and with them each set (model, GPU, backend version, format) in
   which a quarter of the rows is impossible.
"""

import csv
import lzma
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from contracts.roofline import Accelerator, Deployment, ModelShape, Terms, decode_terms, prefill_terms
from pdgate.plan.hardware import accelerators, find_accelerator
from pdgate.plan.models import known_models

DATA = Path(__file__).with_name("data")
SILICON = DATA / "silicon_aggregated.csv.xz"
TRANSFERS = DATA / "kv_transfer_vllm_h800.csv"
IMPOSSIBLE_SET = 0.25
MEASURED_ON = ("H100", "H200", "B200", "B300", "GB200")  # GPUs of the rows that are kept


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run."""

    shape: ModelShape
    gpu: Accelerator
    use: Deployment
    engine: str
    version: str
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float

    @property
    def group(self) -> str:
        """Model and GPU: what a held-out group is made of."""
        return f"{self.shape.name} on {self.gpu.name}"

    @property
    def decode(self) -> Terms:
        """Terms of a decode step at the run's concurrency and mean context."""
        kv_tokens = self.concurrency * (self.prompt_tokens + self.output_tokens / 2)
        return decode_terms(self.shape, self.gpu, self.use, requests=self.concurrency, kv_tokens=kv_tokens)

    @property
    def prefill(self) -> Terms:
        """Terms of one prompt."""
        return prefill_terms(self.shape, self.gpu, self.use, uncached_tokens=self.prompt_tokens)

    @property
    def mixed_ms(self) -> float:
        """Prefill of the other requests per decode step at 100 % of the peak, ms: no run can do better."""
        terms = self.prefill
        one = terms.compute_ms + terms.moe_compute_ms + terms.attention_ms
        return (self.concurrency - 1) * one / self.output_tokens


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One measured KV transfer."""

    system: str
    line_bytes_per_s: float
    kv_bytes: float
    transfer_ms: float


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows were left out, by reason."""

    duplicate: int
    unusable_label: int
    faster_than_possible: int
    set_mostly_impossible: int


def read_silicon(file: Path = SILICON) -> tuple[list[Measured], Dropped]:
    """Return the usable aggregated rows and the count of those left out."""
    models, gpus = known_models(), accelerators()
    with lzma.open(file, "rt", encoding="utf-8", newline="") as lines:
        table = list(csv.DictReader(lines))
    rows: dict[tuple[object, ...], Measured] = {}
    counts: Counter[str] = Counter()
    # smaller labels first: of two labels of one measurement the plainer one stays
    for raw in sorted(table, key=lambda r: float(r["tp_size"] or 1)):
        if raw["system"].startswith("gb") and float(raw["tp_size"] or 1) > 8:
            counts["label"] += 1
            continue
        row = _row(raw, models[raw["model_path"].lower()].shape, find_accelerator(raw["system"].split("_")[0], gpus))
        key = (
            row.group, row.engine, row.use.weights, row.use.gpus, row.concurrency, row.prompt_tokens,
            row.output_tokens, row.ttft_ms, row.tpot_ms,
        )  # fmt: skip
        counts["duplicate"] += key in rows
        rows.setdefault(key, row)
    return _possible(list(rows.values()), counts)


def read_transfers(file: Path = TRANSFERS) -> list[Transfer]:
    """Return the measured KV transfers."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Transfer(
                system=f"{row['stack']} {row['model']} {row['hw']}",
                line_bytes_per_s=float(row["line_rate_GBps"]) * 1e9,
                kv_bytes=float(row["kv_MB"]) * 1e6,
                transfer_ms=float(row["transfer_ms"]),
            )
            for row in csv.DictReader(lines)
        ]


def _row(raw: dict[str, str], shape: ModelShape, gpu: Accelerator) -> Measured:
    tensor, ranks, expert_tensor, expert = (
        int(float(raw[f] or 1)) or 1 for f in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    )
    gpus = _world(tensor=tensor, ranks=ranks, expert_tensor=expert_tensor, expert=expert)
    hidden_ranks = gpus // tensor if tensor < gpus else 1
    attention_dp = gpus if ranks > 1 else hidden_ranks
    weights = raw["precision"] or "bf16"
    engine = raw["backend"]
    # TensorRT-LLM's quantized checkpoints carry an FP8 cache; the others keep it in 16 bits unless told otherwise
    cache = "fp8" if engine == "trtllm" and weights in ("fp8", "fp4") else "bf16"
    return Measured(
        shape=shape,
        gpu=gpu,
        use=Deployment(gpus=gpus, attention_dp=attention_dp, weights=weights, kv=cache),
        engine=engine,
        version=raw["backend_version"],
        concurrency=int(float(raw["concurrency"] or raw["batch_size"])),
        prompt_tokens=int(raw["isl"]),
        output_tokens=int(raw["osl"]),
        ttft_ms=float(raw["silicon_ttft_ms"]),
        tpot_ms=float(raw["silicon_tpot_ms"]),
    )


def _world(*, tensor: int, ranks: int, expert_tensor: int, expert: int) -> int:
    """The real number of GPUs behind multiplied labels."""
    if max(tensor, ranks) > 8:
        return max(expert, expert_tensor)
    if ranks > 1 and expert == ranks * ranks:
        return ranks
    split_experts = expert if expert == expert_tensor else expert * expert_tensor
    return max(tensor, split_experts, ranks)


def _possible(rows: Iterable[Measured], counts: Counter[str]) -> tuple[list[Measured], Dropped]:
    sets: dict[tuple[str, ...], list[tuple[Measured, bool]]] = defaultdict(list)
    for row in rows:
        decode = row.decode
        memory_ms = decode.weights_ms + decode.experts_ms + decode.kv_ms
        fastest_ms = max(memory_ms, decode.compute_ms) + row.mixed_ms
        sets[row.group, row.engine, row.version, row.use.weights].append((row, row.tpot_ms >= fastest_ms))
    kept: list[Measured] = []
    for members in sets.values():
        impossible = sum(not possible for _, possible in members)
        if impossible > IMPOSSIBLE_SET * len(members):
            counts["set"] += len(members)
            continue
        counts["fast"] += impossible
        kept += [row for row, possible in members if possible]
    return kept, Dropped(
        duplicate=counts["duplicate"],
        unusable_label=counts["label"],
        faster_than_possible=counts["fast"],
        set_mostly_impossible=counts["set"],
    )
