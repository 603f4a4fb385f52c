"""aiconfigurator's answers to the questions of `benches.plan_peers`. Runs in an environment of its own.

`PYTHON benches/plan_peer_answers.py QUESTIONS ANSWERS SECONDS`, PYTHON of an environment that has aiconfigurator 0.12.0
and nothing of ours: both files hold JSON lines. An answer that is there already is kept, so a run that was stopped goes
on; after SECONDS no question is begun.
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer what has no answer yet."""
    questions, answers = (Path(name) for name in sys.argv[1:3])
    ends = time.monotonic() + float(sys.argv[3])
    known = {json.loads(line)["id"] for line in answers.read_text().splitlines()} if answers.exists() else set()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for line in questions.read_text().splitlines():
        question = json.loads(line)
        if question["id"] in known or time.monotonic() > ends:
            continue
        started, cpu = time.perf_counter(), time.process_time()
        try:
            found = answer(question)
        except Exception as error:  # a peer refuses in many ways: each is an answer  # noqa: BLE001
            found = {"refused": f"{type(error).__name__}: {error}"[:300]}
        found |= {"id": question["id"], "wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
        with answers.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction of one measured run, or the better of aggregated and disaggregated."""
    from aiconfigurator.cli.api import cli_default, cli_estimate  # noqa: PLC0415 (of the other environment)

    common = {
        "model_path": question["model"],
        "isl": question["prompt_tokens"],
        "osl": question["output_tokens"],
    }
    if "tpot_target_ms" in question:
        result = cli_default(
            **common,
            system=question["system"],
            backend=question["engine"],
            total_gpus=question["gpus"],
            ttft=question["ttft_target_ms"],
            tpot=question["tpot_target_ms"],
        )
        best = {name: float(value) for name, value in result.best_throughputs.items()}
        workers = {}
        for name, table in result.best_configs.items():
            if len(table):
                row = table.iloc[0].to_dict()
                keys = [k for k in row if k.endswith(("parallel", "workers")) and not k.startswith("(e)")]
                workers[name] = {k: str(row[k]) for k in keys}
        return {"tokens_per_s_per_gpu": best, "workers": workers, "chosen": str(result.chosen_exp)}
    ranks, gpus = question["attention_dp"], question["gpus"]
    modes = {k: question[k] for k in ("gemm_quant_mode", "moe_quant_mode", "kvcache_quant_mode") if question.get(k)}
    tries = (
        [{"moe_tp_size": gpus, "moe_ep_size": 1}, {"moe_tp_size": 1, "moe_ep_size": gpus}] if question["moe"] else [{}]
    )
    for index, experts in enumerate(tries):
        try:
            found = cli_estimate(
                **common,
                **experts,
                **modes,
                system_name=question["system"],
                backend_name=question["engine"],
                mode="agg",
                batch_size=max(1, question["concurrency"] // ranks),
                tp_size=gpus // ranks,
                attention_dp_size=ranks,
            )
        except Exception:
            if index + 1 == len(tries):
                raise
        else:
            return {"ttft_ms": float(found.ttft), "tpot_ms": float(found.tpot)}
    raise AssertionError


if __name__ == "__main__":
    main()
