"""`pdgate replay`: a log is played again, and what is missing is said."""

import json

import pytest
import typer
from typer.testing import CliRunner

from contracts.lifecycle import HandOff, Role, WorkerState
from contracts.slo import SloTarget
from pdgate.preflight import CannotStart
from pdgate.replay import replay
from scheduler.policy.blame import Stage
from scheduler.policy.decisions import Arrived, Ended, Head, Refused, Ticked, WorkerSeen, encode
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Mode, Move
from scheduler.simulator.arrivals import Lengths, Workload, poisson
from scheduler.simulator.play import Policy, play
from scheduler.simulator.report import met_targets
from scheduler.simulator.setup import H100_8B, Setup

TARGET = SloTarget(ttft_ms=2000, tpot_ms=20)
SPLIT = Split(prefill=2, decode=6)
PROMPTS = Workload(prompt=Lengths(median=6000, p90_over_median=2.0), output=Lengths(median=60), rate_rps=14.0)

app = typer.Typer()
app.command()(replay)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log as a pool with a wrong split would have written it: the simulator stands in for the workers."""
    arrivals = list(poisson(PROMPTS, duration_s=60, seed=3))
    _, simulation = play(arrivals, Setup(split=SPLIT, target=TARGET), Policy.STATIC)
    records = [
        Head(at_unix_ms=1_700_000_000_000, model="m", hand_off=HandOff.DIRECT, mode=Mode.AUTO, latency=H100_8B,
             targets={"default": TARGET}, block_tokens=64),
    ]  # fmt: skip
    roles = [Role.PREFILL] * SPLIT.prefill + [Role.DECODE] * SPLIT.decode
    records += [
        WorkerSeen(at_ms=0, worker_id=f"w{n}", epoch=1, role=role, state=WorkerState.READY)
        for n, role in enumerate(roles)
    ]
    for job in simulation.jobs.values():
        rid, arrival = f"r{job.number}", job.arrival
        records.append(
            Arrived(at_ms=job.arrived_ms, rid=rid, tier="default", tenant="t", prompt_tokens=arrival.prompt_tokens,
                    max_tokens=arrival.max_tokens)
        )  # fmt: skip
        if job.done:
            records.append(
                Ended(at_ms=job.end_ms, rid=rid, prompt_tokens=arrival.prompt_tokens, cached_tokens=0,
                      output_tokens=arrival.output_tokens, ttft_ms=job.ttft_ms, tpot_ms=job.tpot_ms,
                      met=met_targets(job, TARGET), blamed=Stage.NONE)
            )  # fmt: skip
        else:
            records.append(Refused(at_ms=job.arrived_ms, rid=rid, reason=job.refused))
    head = [record for record in records if not isinstance(record, Arrived | Ended | Refused)]
    rest = sorted((r for r in records if r not in head), key=lambda record: record.at_ms)
    file = tmp_path_factory.mktemp("log") / "m.jsonl"
    file.write_bytes(b"".join(encode(record) for record in [*head, *rest]))
    return file


def test_the_logged_policy_comes_out_as_logged_and_a_better_one_better(log):
    got = json.loads(run(str(log), "--policy", "static:5/3", "--json").stdout)
    assert got["first_split"] == "2P6D0U"
    assert got["logged_in_simulator"]["attainment"] == pytest.approx(got["logged"]["attainment"], abs=0.02)
    assert got["counterfactual"]["attainment"] > got["logged"]["attainment"] + 0.2
    assert got["counterfactual"]["goodput_rps"] > got["logged"]["goodput_rps"]
    assert got["counterfactual_split"] == "5P3D0U"


def test_a_policy_without_a_split_of_its_own_begins_with_the_logged_one(log):
    got = json.loads(run(str(log), "--policy", "static", "--json").stdout)
    assert got["counterfactual"] == got["logged_in_simulator"]


def test_logged_moves_are_made_again(log, tmp_path):
    move = Ticked(at_ms=5000, split=SPLIT, why="gain", target=SPLIT, gain=0.5,
                  move=Move(worker_id="w5", from_role=Role.DECODE, to_role=Role.PREFILL))  # fmt: skip
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(log.read_bytes() + encode(move))
    got = json.loads(run(str(moved), "--policy", "static", "--json").stdout)
    assert got["logged_in_simulator"]["flips"] == 1
    assert got["logged_in_simulator"]["attainment"] > got["counterfactual"]["attainment"]


def test_a_table_names_the_three(log):
    shown = run(str(log)).stdout
    assert "logged role changes, simulated" in shown
    assert "auto, simulated" in shown


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([b"{}\n", b"{}\n"], "line 1"),
        ([encode(Refused(at_ms=1, rid="r", reason="x"))], "no head"),
    ],
)
def test_what_is_no_log_is_one_clear_line(tmp_path, lines, says):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b"".join(lines))
    got = run(str(file))
    assert isinstance(got.exception, CannotStart)
    assert says in str(got.exception)
