"""The closed form beside NVIDIA Dynamo's mocker, an engine model and a router that are not ours.

`python -m benches.plan_mocker` (the mocker's environment: `benches.mocker`). The planner is given the mocker's own
timing (its default polynomials, read off its answers to single requests), so what is compared is the decision: whether
a split gains 30 % on eight workers, and which split is best. Unified workers take the best of three chunk sizes on both
sides; prefix caching is off. The constant of the prefill polynomial is one step's: prompts that a prefill worker takes
together share it, each chunk of a unified worker pays it again.

A run takes long, so it may be done in pieces (`--minutes 10`): questions with an answer in the results are kept.
"""

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benches.mocker import Mocker
from benches.mocker_trace import write_trace
from benches.plan_agreement import wilson
from benches.plan_cases import TRAFFIC, TTFT_MS
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.roofline import Deployment
from contracts.slo import SloTarget
from pdgate.plan.decide import WORTH
from pdgate.plan.described import sample
from pdgate.plan.fit import fitted
from pdgate.plan.fleet import Setting, Worker
from pdgate.plan.hardware import accelerators
from pdgate.plan.models import find_model
from pdgate.plan.options import best
from pdgate.plan.shapes import Kind, Shape, unified_shapes
from pdgate.plan.traffic import Traffics
from pdgate.plan.workload import Workload, mean, percentile

RESULTS = Path(__file__).parent / "results" / "plan_mocker.json"
WORKERS = 8
REQUESTS = 800
TPOT_MS = (10.0, 20.0, 30.0)
TTFT_FACTORS = (1.0, 0.5)
CHUNKS = (512, 2048, 8192)
QUESTIONS = len(TRAFFIC) * len(TPOT_MS) * len(TTFT_FACTORS)
BISECTIONS = 5
STRESS = 1.1  # of the chosen split's capacity, where splits are told apart
NEAR_BEST = 0.97
ATTAINMENT = 0.9
# the mocker's default timing: prefill 16.50 + 0.01518*n + 4.21e-7*n^2 ms, decode 5.74 + 54.01*p - 25.74*p^2 ms with p
# the share of its 16,384 blocks of 64 tokens in use
KV_TOKENS = 16_384 * 64
STEP_TOKENS = 8192  # prompt tokens that a prefill worker takes at once
FIXED_MS, LINEAR_MS, SQUARE_MS = 5.74, 54.01, -25.74
PREFILL = PrefillCost(fixed_ms=16.50, per_token_ms=0.01518, per_token_pair_ms=4.21e-7)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One question and both answers."""

    traffic: str
    ttft_ms: float
    tpot_ms: float
    gain: float | None  # closed form; None = one of both keeps the targets at no rate
    mocker_gain: float | None
    prefill: int  # of the closed form's split
    mocker_prefill: int  # best of all splits at 1.1 times the chosen one's capacity
    of_best: float  # attainment of the chosen split over the best one's

    @property
    def agrees(self) -> bool:
        """Whether both say the same of 30 %."""
        return _pays(self.gain) == _pays(self.mocker_gain)


class Player(Mocker):
    """The other environment's process."""

    def attainment(self, trace: Path, target: SloTarget, rate_rps: float, **fleet: int) -> float:
        """Play a trace at a rate and return the share (0 to 1) that met both targets."""
        ask = {"trace": str(trace), "rate_rps": rate_rps, "ttft_ms": target.ttft_ms, "tpot_ms": target.tpot_ms}
        whole = {"prefill": 0, "decode": 0, "unified": 0, "chunk_tokens": 0} | fleet
        return float(json.loads(self.ask(json.dumps(ask | whole)))["attainment"])

    def capacity(self, trace: Path, target: SloTarget, near_rps: float, **fleet: int) -> float:
        """Return the highest rate that keeps the attainment, between a third and three times `near_rps`; 0 = none."""
        low, high = near_rps / 3, near_rps * 3
        if self.attainment(trace, target, low, **fleet) < ATTAINMENT:
            return 0.0
        for _ in range(BISECTIONS):
            rate = math.sqrt(low * high)
            low, high = (rate, high) if self.attainment(trace, target, rate, **fleet) >= ATTAINMENT else (low, rate)
        return math.sqrt(low * high)


def main() -> None:
    """Ask both what has no answer yet, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python of an environment with ai-dynamo 1.6.1 (default: made in .pdgate/peers)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no question after so many")
    options = parser.parse_args()
    mocker = Player("benches.plan_mocker_runs", python=options.peer)
    ends = time.monotonic() + 60 * options.minutes
    rows = msgspec.json.decode(RESULTS.read_bytes(), type=list[Row]) if RESULTS.exists() else []
    known = {(row.traffic, row.ttft_ms, row.tpot_ms) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        loads = {}
        for traffic, description in TRAFFIC.items():
            loads[traffic] = sample(msgspec.structs.replace(description, sample=REQUESTS, prefix_reuse=0.0))
            evenly = loads[traffic].at_rate(1.0).requests
            timed = ((r.arrival_s, r.prompt_tokens, r.output_tokens) for r in evenly)
            write_trace(Path(folder) / f"{traffic}.jsonl", timed)
        for factor, tpot_ms, (traffic, load) in itertools.product(TTFT_FACTORS, TPOT_MS, loads.items()):
            target = SloTarget(ttft_ms=TTFT_MS[traffic] * factor, tpot_ms=tpot_ms)
            if (traffic, target.ttft_ms, tpot_ms) in known or time.monotonic() > ends:
                continue
            row = _row(traffic, load, Path(folder) / f"{traffic}.jsonl", target, mocker)
            if row is not None:
                rows.append(row)
                print(msgspec.json.encode(row).decode(), flush=True)
                RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    mocker.end()
    for name, hits in (("a split gains 30 %", [r.agrees for r in rows]), ("split within 3 % of the best", _near(rows))):
        low, high = wilson(sum(hits), len(hits))
        print(f"{name}: {sum(hits)} of {len(hits)} = {sum(hits) / len(hits):.0%} ({low:.0%} to {high:.0%})")
    apart = sorted(abs(r.gain - r.mocker_gain) for r in rows if r.gain is not None and r.mocker_gain is not None)
    print(f"gains differ by {100 * percentile(apart, 0.5):.0f} points in the median, n {len(apart)}")


def latency_of(tpot_ms: float) -> LatencyModel:
    """Return the mocker's timing, its decode polynomial replaced by the chord up to the target."""
    share = 1.0
    for i in range(1, 101):  # the share of its memory at which a step takes the target
        if FIXED_MS + LINEAR_MS * i / 100 + SQUARE_MS * (i / 100) ** 2 >= tpot_ms:
            share = i / 100
            break
    top = FIXED_MS + LINEAR_MS * share + SQUARE_MS * share**2
    return LatencyModel(
        prefill=PREFILL,
        decode=DecodeCost(fixed_ms=FIXED_MS, per_kv_token_ms=(top - FIXED_MS) / share / KV_TOKENS),
        # the decode worker sends the first token: one step, whatever the prompt
        transfer=TransferCost(fixed_ms=tpot_ms / 2, bytes_per_ms=1e12, kv_bytes_per_token=1),
        kv_capacity_tokens=KV_TOKENS,
        max_running=256,
    )


def _row(traffic: str, load: Workload, trace: Path, target: SloTarget, mocker: Player) -> Row | None:
    assert target.tpot_ms is not None
    traffics = Traffics(load, target)
    worker = Worker(gpu=accelerators()["H100"], use=Deployment(), latency=latency_of(target.tpot_ms))
    setting = Setting(
        shape=msgspec.structs.replace(find_model("llama-3-8b").shape, layers=1),
        fit=fitted(),
        weights="bf16",
        kv="bf16",
        engine="vllm",
        target=target,
        moments=traffics.moments,
        attainment=ATTAINMENT,
        mixing=1.0,  # the mocker adds a chunk's time to the step's
    )
    by_chunk = (msgspec.structs.replace(setting, chunk_tokens=chunk) for chunk in CHUNKS)
    known = [best(unified_shapes([worker], WORKERS), traffics, one) for one in by_chunk]
    unified = max((found for found in known if found is not None), key=lambda found: found[1], default=None)
    split = best(_splits(_together(worker, load)), traffics, setting)
    if split is None:
        return None
    shape, rate = split
    stress = STRESS * rate
    seen = {p: mocker.attainment(trace, target, stress, prefill=p, decode=WORKERS - p) for p in range(1, WORKERS)}
    top = max(seen, key=lambda p: seen[p])
    near = unified[1] if unified else rate
    chunks = {c: mocker.attainment(trace, target, near, unified=WORKERS, chunk_tokens=c) for c in CHUNKS}
    chunk = max(chunks, key=lambda c: chunks[c])
    one = mocker.capacity(trace, target, near, unified=WORKERS, chunk_tokens=chunk)
    own = two = mocker.capacity(trace, target, rate, prefill=shape.prefill, decode=shape.decode)
    if top != shape.prefill:
        two = max(own, mocker.capacity(trace, target, rate, prefill=top, decode=WORKERS - top))
    return Row(
        traffic=traffic,
        ttft_ms=target.ttft_ms or 0.0,
        tpot_ms=target.tpot_ms,
        gain=rate / unified[1] - 1 if unified else None,
        mocker_gain=two / one - 1 if one else None,
        prefill=shape.prefill,
        mocker_prefill=top,
        of_best=own / two if two else 0.0,
    )


def _together(worker: Worker, load: Workload) -> Worker:
    """A prefill worker whose full steps share the constant among their prompts."""
    prompts = STEP_TOKENS / mean([float(r.prompt_tokens) for r in load.requests])
    prefill = msgspec.structs.replace(PREFILL, fixed_ms=PREFILL.fixed_ms / max(1.0, prompts))
    return msgspec.structs.replace(worker, latency=msgspec.structs.replace(worker.latency, prefill=prefill))


def _splits(worker: Worker) -> Iterator[Shape]:
    for p in range(1, WORKERS):
        yield Shape(
            kind=Kind.SPLIT_NO_REUSE,
            prefill=p,
            decode=WORKERS - p,
            prefill_worker=worker,
            decode_worker=worker,
        )


def _near(rows: list[Row]) -> list[bool]:
    return [r.of_best >= NEAR_BEST for r in rows]


def _pays(gain: float | None) -> bool:
    """None: unified workers keep the targets at no rate, so a split is all there is."""
    return gain is None or gain >= WORTH


if __name__ == "__main__":
    main()
