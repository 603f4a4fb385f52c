"""Plays one question after the other in Dynamo's mocker, in the environment that has it (`benches.mocker`).

One `Question` a line comes in on stdin, one `Answer` goes out on stdout, both as JSON.
"""

import contextlib
import functools
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benches.mocker_trace import write_trace
from benches.referee.adapter import Engine, RatioScaling
from benches.referee.capped import Capped
from benches.referee.costs import StepWatch, calibration, fitted
from benches.referee.finished import Asked
from benches.referee.questions import Answer, Change, Kind, Question
from contracts.perf import LatencyModel
from contracts.slo import SloTarget

_BLOCK_TOKENS, _BLOCKS = 64, 16_384  # the mocker's own defaults, said so that the adapter knows them
_MAX_RUNNING, _STEP_TOKENS = 256, 8192


def main() -> None:
    """Answer until stdin ends."""
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        answer = play(msgspec.json.decode(line, type=Question))
        print(msgspec.json.encode(answer).decode(), flush=True)


def play(question: Question) -> Answer:
    """Play a trace once."""
    began_s = time.process_time()
    target = SloTarget(ttft_ms=question.ttft_ms, tpot_ms=question.tpot_ms)
    changes: list[Change] = []
    moved = wished = 0
    told: tuple[int, int] | None = None
    fleet = fleet_of(question)
    if question.kind is Kind.RATIO:
        engine = Engine(
            latency=measured_costs(question.router),
            kv_capacity_tokens=_BLOCKS * _BLOCK_TOKENS,
            max_running=_MAX_RUNNING,
            step_tokens=_STEP_TOKENS,
        )
        policy = RatioScaling(
            requests_of(Path(question.trace)), target=target, engine=engine, switch_s=question.start_s
        )
        rows = _replay(question, fleet, policy)
        changes = [Change(at_s, f"{m.from_role} to {m.to_role}") for at_s, m in policy.moves]
        wished, moved = len(policy.moves), 2 * len(policy.moves)
        told = policy.underway.num_told, policy.underway.num_guessed
    elif question.kind is Kind.PLANNER:
        with _planner(question, fleet) as planner:
            capped = Capped(planner, question.prefill + question.decode)
            rows = _replay(question, fleet, capped)
        wished, moved = capped.num_wished, capped.num_moved
    else:
        rows = _replay(question, fleet, None)
    return answer_of(question, rows, began_s, changes=changes, moved=moved, wished=wished, told=told)


def answer_of(
    question: Question,
    rows: list[dict[str, Any]],
    began_s: float,
    *,
    changes: list[Change],
    moved: int,
    wished: int,
    told: tuple[int, int] | None,
) -> Answer:
    """Return the figures of a replay. TPOT is a request's mean gap."""
    done = [row for row in rows if row["terminal_status"] == "completed"]
    in_time = [row["ttft_ms"] <= question.ttft_ms for row in done]
    steady = [(row["itl_ms"] or 0.0) <= question.tpot_ms for row in done]
    met = sum(early and even for early, even in zip(in_time, steady, strict=True))
    return Answer(
        requests=len(rows),
        completed=len(done),
        met=met,
        late=len(in_time) - sum(in_time),
        slow=len(steady) - sum(steady),
        changes=changes,
        moved=moved,
        wished=wished,
        told=told,
        cpu_s=time.process_time() - began_s,
    )


def requests_of(trace: Path) -> list[Asked]:
    """Return the requests of a trace in the mocker's format, their times from the first."""
    rows = [msgspec.json.decode(line) for line in trace.read_bytes().splitlines()]
    start_ms = rows[0]["timestamp"]
    return [
        Asked(number, (row["timestamp"] - start_ms) / 1000, row["input_length"], row["output_length"])
        for number, row in enumerate(rows)
    ]


@functools.cache
def measured_costs(router: str) -> LatencyModel:
    """Return what a worker costs, by single prompts and decode steps on idle workers."""
    watch = StepWatch()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "calibration.jsonl"
        write_trace(trace, ((r.at_s, r.prompt_tokens, r.output_tokens) for r in calibration()))
        question = Question(
            trace=str(trace), kind=Kind.STATIC, ttft_ms=0.0, tpot_ms=0.0, prefill=1, decode=1, router=router
        )
        rows = _replay(question, fleet_of(question), watch)
    return fitted(rows, watch.steps)


def fleet_of(question: Question) -> dict[str, Any]:
    """Return the workers of a replay: the mocker's defaults but for prefix caching, which is off."""
    plain = {
        "enable_prefix_caching": False,
        "num_gpu_blocks": _BLOCKS,
        "block_size": _BLOCK_TOKENS,
        "max_num_seqs": _MAX_RUNNING,
        "max_num_batched_tokens": _STEP_TOKENS,
    }

    def engine(**more: str | int) -> Any:
        try:
            from dynamo.mocker import MockEngineArgs  # noqa: PLC0415 (of the other environment, up to 1.5)
        except ImportError:
            return {"engine": plain | more, "startup_time": question.start_s}
        return MockEngineArgs(**(plain | more), startup_time=question.start_s)

    if question.kind is Kind.UNIFIED:
        whole = engine(max_num_batched_tokens=question.chunk_tokens)
        return {"num_workers": question.unified, "extra_engine_args": whole}
    return {
        "num_prefill_workers": question.prefill,
        "num_decode_workers": question.decode,
        "prefill_engine_args": engine(worker_type="prefill"),
        "decode_engine_args": engine(worker_type="decode"),
    }


def _replay(question: Question, fleet: dict[str, Any], policy: Any) -> list[dict[str, Any]]:
    """Play in the mocker, under a scaling policy or none, and return what it says of each request."""
    from dynamo._core import run_mocker_trace_replay  # noqa: PLC0415 (of the other environment)

    with tempfile.NamedTemporaryFile(suffix=".jsonl") as report:
        run_mocker_trace_replay(
            [question.trace],
            **fleet,
            router_mode=question.router,
            trace_block_size=512,
            report_jsonl_path=report.name,
            scaling_policy=policy,
        )
        return [msgspec.json.decode(line) for line in Path(report.name).read_bytes().splitlines()]


@contextlib.contextmanager
def _planner(question: Question, fleet: dict[str, Any]) -> Iterator[Any]:
    """Yield Dynamo's own planner, made as its replay command makes it."""
    from dynamo.replay.main import _planner_replay_adapter  # noqa: PLC0415 (of the other environment)

    with _planner_replay_adapter(
        extra_engine_args=None,
        prefill_engine_args=fleet["prefill_engine_args"],
        decode_engine_args=fleet["decode_engine_args"],
        planner_config_arg=msgspec.json.encode(question.settings).decode(),
    ) as planner:
        yield planner


if __name__ == "__main__":
    main()
