"""The planner beside aiconfigurator on the same questions: both answers, both errors, both run times.

`python -m benches.plan_peers --peer PYTHON`, PYTHON of an environment that has aiconfigurator 0.12.0 (it needs one of
its own; `--minutes 10` asks in pieces). Without `--peer` the peer's committed answers are used. Two kinds of question:

* runs: TPOT and TTFT of measured aggregated runs, at most a dozen per model and GPU, evenly over their concurrency.
  Ours are predicted by factors that never saw the model and GPU; the peer interpolates its own operator measurements.
* choices: split or not, on 16 GPUs, where both ways were measured (`benches.plan_pairs`).
"""

import argparse
import itertools
import math
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benches.plan_pairs import RESULTS as PAIRS
from benches.plan_pairs import Report
from contracts.roofline import Efficiency
from contracts.slo import SloTarget
from pdgate.plan.compare import Ask
from pdgate.plan.decide import WORTH, decide
from pdgate.plan.described import Description, sample
from pdgate.plan.fit import LOW_CONCURRENCY, efficiency, fit, fit_transfer
from pdgate.plan.fleet import Setting
from pdgate.plan.hardware import accelerators, find_accelerator
from pdgate.plan.measured import Measured, read_silicon, read_transfers
from pdgate.plan.models import find_model
from pdgate.plan.traffic import Traffics
from pdgate.plan.workload import mean, percentile

FOLDER = Path(__file__).parent / "results"
QUESTIONS, ANSWERS, RESULTS = (FOLDER / f"plan_peers{end}" for end in ("_questions.jsonl", "_answers.jsonl", ".json"))
PER_GROUP = 12
GPUS = 16
TTFT_MS = 5_000.0  # of the choices: wide, since the measured pairs are by TPOT alone
CHOICE_TARGETS_MS = (20.0, 40.0)
PEER_MODELS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "glm-5": "zai-org/GLM-5",
    "kimi-k2": "moonshotai/Kimi-K2.5",
    "llama-3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3-8b": "meta-llama/Meta-Llama-3.1-8B",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
}
PER_TENSOR = ("llama-3-70b", "qwen3-32b")  # FP8 checkpoints without blocks, as the measured runs' labels say
QUANTS = {"fp8": ("fp8_block", "fp8_block"), "fp4": ("nvfp4", "nvfp4"), "int4": ("bfloat16", "int4_wo")}


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run and both predictions; None = the peer refused."""

    group: str
    engine: str
    concurrency: int
    unloaded: bool
    tpot_ms: float
    ttft_ms: float
    ours_tpot_ms: float
    ours_ttft_ms: float
    peer_tpot_ms: float | None
    peer_ttft_ms: float | None
    peer_refused: str = ""  # why, in its words


class ChoiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One choice and both answers: gain of a split in tokens/s per GPU over the best aggregated deployment."""

    system: str
    tpot_ms: float
    measured: float
    ours: float | None
    ours_workers: str
    peer: float | None
    peer_workers: str
    # answer tokens per second and GPU, aggregated and split, as far as known
    measured_tokens: tuple[float, float]
    ours_tokens: tuple[float, float]
    peer_tokens: tuple[float, float]
    ours_s: float  # CPU seconds
    peer_s: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    runs: list[RunRow]
    choices: list[ChoiceRow]
    not_asked: int = 0  # runs and choices
    ours_run_s: float  # CPU seconds per run predicted, fit excluded
    peer_run_s: float


def main() -> None:
    """Ask both and print the tables; questions without an answer are left out and counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python of an environment with aiconfigurator")
    parser.add_argument("--minutes", type=float, default=math.inf, help="ask the peer nothing after so many")
    options = parser.parse_args()
    rows, _ = read_silicon()
    chosen = _sample(rows)
    pairs = msgspec.json.decode(PAIRS.read_bytes(), type=dict[str, Report])["never seen"]
    choices = [q for q in pairs.questions if q.tpot_ms in CHOICE_TARGETS_MS]
    runs = [_run_question(row, i) for i, row in enumerate(chosen)]
    # one run of each group after the other, so a bench that is stopped has seen all kinds; choices take longest
    questions = sorted(runs, key=lambda q: int(q["id"].partition("-")[2]) % PER_GROUP)
    questions += [_choice(q.system, q.tpot_ms) for q in choices]
    QUESTIONS.write_bytes(b"\n".join(map(msgspec.json.encode, questions)) + b"\n")
    if options.peer:
        environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
        script = str(Path(__file__).with_name("plan_peer_answers.py"))
        command = [options.peer, script, str(QUESTIONS), str(ANSWERS), str(60 * options.minutes)]
        subprocess.run(command, check=True, env=environ)
    answers = {a["id"]: a for a in map(msgspec.json.decode, ANSWERS.read_bytes().splitlines())}
    found = _found(chosen, rows, choices, answers)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    _print(found)


def _found(
    chosen: Sequence[Measured], rows: Sequence[Measured], choices: Sequence[Any], answers: dict[str, Any]
) -> Found:
    unseen = {group: fit([r for r in rows if r.group != group]) for group in sorted({r.group for r in chosen})}
    transfer = fit_transfer(read_transfers())
    started = time.process_time()
    ours = [(unseen[r.group].tpot_ms(r), unseen[r.group].ttft_ms(r)) for r in chosen]
    ours_run_s = (time.process_time() - started) / len(chosen)
    theirs = [answers.get(f"run-{i}") for i in range(len(chosen))]
    return Found(
        runs=[
            RunRow(
                group=r.group,
                engine=r.engine,
                concurrency=r.concurrency,
                unloaded=r.concurrency <= LOW_CONCURRENCY,
                tpot_ms=r.tpot_ms,
                ttft_ms=r.ttft_ms,
                ours_tpot_ms=tpot,
                ours_ttft_ms=ttft,
                peer_tpot_ms=peer.get("tpot_ms"),
                peer_ttft_ms=peer.get("ttft_ms"),
                peer_refused=peer.get("refused", ""),
            )
            for r, (tpot, ttft), peer in zip(chosen, ours, theirs, strict=True)
            if peer is not None
        ],
        choices=[
            _choice_row(q, answers[known], efficiency(unseen[" ".join(q.system.split(" ")[:3])], transfer))
            for q in choices
            if (known := _choice(q.system, q.tpot_ms)["id"]) in answers
        ],
        not_asked=len(chosen) + len(choices) - len(answers),
        ours_run_s=ours_run_s,
        peer_run_s=mean([a["cpu_s"] for a in theirs if a is not None]),
    )


def _sample(rows: Sequence[Measured]) -> list[Measured]:
    found = []
    ordered = sorted(
        rows, key=lambda r: (r.group, r.engine, r.concurrency, r.use.gpus, r.prompt_tokens, r.output_tokens, r.tpot_ms)
    )
    for _, members in itertools.groupby(ordered, key=lambda r: r.group):
        group = list(members)
        count = min(PER_GROUP, len(group))
        found += [group[i * len(group) // count] for i in range(count)]
    return found


def _run_question(row: Measured, index: int) -> dict[str, Any]:
    gemm, moe = QUANTS.get(row.use.weights, (None, None))
    if row.use.weights == "fp8" and row.shape.name in PER_TENSOR:
        gemm = "fp8"
    return {
        "id": f"run-{index}",
        "model": PEER_MODELS[row.shape.name],
        "system": _system(row.gpu.name),
        "engine": row.engine,
        "gpus": row.use.gpus,
        "attention_dp": row.use.attention_dp,
        "moe": bool(row.shape.experts),
        "concurrency": row.concurrency,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
        "gemm_quant_mode": gemm,
        "moe_quant_mode": moe if row.shape.experts else None,
    }


def _choice(system: str, tpot_ms: float) -> dict[str, Any]:
    model, _, gpu, engine, weights, lengths = system.split(" ")
    prompt, output = map(int, lengths.split("/"))
    names = {"fp8": PEER_MODELS[model], "fp4": "nvidia/DeepSeek-V3.1-NVFP4"}
    return {
        "id": f"choice-{system}-{tpot_ms:g}",
        "model": names[weights],
        "system": _system(gpu),
        "engine": engine,
        "gpus": GPUS,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "ttft_target_ms": TTFT_MS,
        "tpot_target_ms": tpot_ms,
    }


def _system(gpu: str) -> str:
    return gpu.lower() if gpu.startswith("GB") else f"{gpu.lower()}_sxm"


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One's answers beside what was measured."""

    number: int  # that said anything
    same: int  # of these on the same side of the default rule
    gain_errors: list[float]  # factors (1 and above) by which gains, as ratios, are off; sorted
    token_errors: list[float]  # the same of tokens per second and GPU, of either way


def judged(choices: Sequence[ChoiceRow], who: str) -> Judged:
    """Hold the answers of `ours` or `peer` against the measurements."""
    gains = [(gain, c.measured) for c in choices if (gain := getattr(c, who)) is not None]
    tokens = [
        pair
        for c in choices
        for pair in zip(getattr(c, f"{who}_tokens"), c.measured_tokens, strict=True)
        if pair[0] > 0
    ]
    return Judged(
        number=len(gains),
        same=sum((gain >= WORTH) == (measured >= WORTH) for gain, measured in gains),
        gain_errors=sorted(_factor(1 + gain, 1 + measured) for gain, measured in gains),
        token_errors=sorted(_factor(*pair) for pair in tokens),
    )


def _factor(one: float, other: float) -> float:
    return math.exp(abs(math.log(one / other)))


def _choice_row(question: Any, answer: dict[str, Any], unseen: Efficiency) -> ChoiceRow:
    started = time.process_time()
    gain, workers, tokens = _ours(question.system, question.tpot_ms, unseen)
    ours_s = time.process_time() - started
    best = answer.get("tokens_per_s_per_gpu", {})
    one, two = best.get("agg", 0.0), best.get("disagg", 0.0)
    return ChoiceRow(
        system=question.system,
        tpot_ms=question.tpot_ms,
        measured=question.measured,
        ours=gain,
        ours_workers=workers,
        peer=two / one - 1 if one and two else None,
        peer_workers=answer.get("refused", answer.get("chosen", "")),
        measured_tokens=question.measured_tokens,
        ours_tokens=tokens,
        peer_tokens=(one, two),
        ours_s=ours_s,
        peer_s=answer["cpu_s"],
    )


def _ours(system: str, tpot_ms: float, unseen: Efficiency) -> tuple[float | None, str, tuple[float, float]]:
    """The planner's gain with its own search on as many GPUs: requests of equal length that arrive at random.

    The factors never saw the model on that GPU. Nine requests of ten are to keep both targets; what was measured is the
    mean TPOT of runs with a fixed number of requests at once, which is a little easier for either way.
    """
    model, _, gpu, engine, weights, lengths = system.split(" ")
    prompt, output = map(int, lengths.split("/"))
    load = sample(
        Description(rate_rps=1, prompt_tokens=prompt, output_tokens=output, prompt_cv=0, output_cv=0, sample=1000)
    )
    target = SloTarget(ttft_ms=TTFT_MS, tpot_ms=tpot_ms)
    traffics = Traffics(load, target)
    setting = Setting(
        shape=find_model(model).shape,
        fit=unseen,
        weights=weights,
        kv="fp8" if engine == "trtllm" else "bf16",
        engine=engine,
        target=target,
        moments=traffics.moments,
    )
    choice = decide(Ask(fleet=((GPUS, find_accelerator(gpu, accelerators())),)), traffics, setting)
    if choice.unified is None or choice.split is None:
        return None, choice.reason, (0.0, 0.0)
    tokens = choice.unified[1] * output / GPUS, choice.split[1] * output / GPUS
    return choice.goodput_gain, f"{choice.unified[0].text()} or {choice.split[0].text()}", tokens


def _print(found: Found) -> None:
    console = Console(width=120)
    table = Table(title="TPOT of measured runs", title_justify="left", box=None)
    for column in ("model and GPU", "asked", "answered", "ours MAPE", "peer MAPE", "ours TTFT*", "peer TTFT*"):
        table.add_column(column, justify="left" if column == "model and GPU" else "right")
    groups = {r.group: [x for x in found.runs if x.group == r.group] for r in found.runs}
    for group, rows in [*groups.items(), ("all", found.runs)]:
        both = [r for r in rows if r.peer_tpot_ms is not None]
        calm = [r for r in both if r.unloaded]
        table.add_row(
            group,
            str(len(rows)),
            str(len(both)),
            _mape([r.ours_tpot_ms / r.tpot_ms for r in both]),
            _mape([(r.peer_tpot_ms or 0.0) / r.tpot_ms for r in both]),
            _mape([r.ours_ttft_ms / r.ttft_ms for r in calm]),
            _mape([(r.peer_ttft_ms or 0.0) / r.ttft_ms for r in calm]),
        )
    console.print(table)
    console.print("* of runs with at most four requests at once; errors over the runs that both answer")
    for (group, why), members in itertools.groupby(
        sorted((r.group, r.peer_refused) for r in found.runs if r.peer_refused), key=lambda pair: pair
    ):
        console.print(f"refused, {group}, {len(list(members))} runs: {why}")
    if found.not_asked:
        console.print(f"{found.not_asked} questions were not asked yet")
    console.print(f"CPU per run: ours {1e3 * found.ours_run_s:.2f} ms, peer {1e3 * found.peer_run_s:.0f} ms\n")
    table = Table(title=f"Gain of a split on {GPUS} GPUs", title_justify="left", box=None)
    for column in ("system", "TPOT", "measured", "ours", "peer", "ours CPU s", "peer CPU s"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for c in found.choices:
        table.add_row(
            c.system,
            f"{c.tpot_ms:g} ms",
            _gain(c.measured),
            _gain(c.ours),
            _gain(c.peer),
            f"{c.ours_s:.1f}",
            f"{c.peer_s:.1f}",
        )
    console.print(table)
    for name in ("ours", "peer"):
        said = judged(found.choices, name)
        gains, tokens = said.gain_errors, said.token_errors
        console.print(
            f"{name}: says of 30 % what was measured in {said.same} of {said.number}; gain off by a factor of "
            f"{percentile(gains, 0.5):.2f} (median), {mean(gains):.2f} (mean); tokens/s per GPU by "
            f"{percentile(tokens, 0.5):.2f}, {mean(tokens):.2f}"
        )


def _mape(ratios: Sequence[float]) -> str:
    return f"{mean([abs(r - 1) for r in ratios]):.1%}" if ratios else "-"


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:+.0%}"


if __name__ == "__main__":
    main()
