"""`pdgate plan` as a user runs it."""

import json
import re
import tomllib
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from pdgate.cli import app, main
from pdgate.plan.command import parse_target
from pdgate.plan.described import DATA
from pdgate.plan.workload import WorkloadError

QUICK = [
    "plan",
    "--rate",
    "8",
    "--prompt-tokens",
    "1000",
    "--output-tokens",
    "200",
    "--weights",
    "fp8",
    "--no-simulation",
]


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_the_promised_keys():
    found = json.loads(run(*QUICK[:-1], "--slo", "ttft=2s,tpot=30ms", "--gpus", "8xH100", "--json"))
    assert found["verdict"] in ("split", "unified", "mixed", "infeasible")
    assert {"prefill", "decode", "unified"} <= found.keys()
    assert isinstance(found["goodput_gain"], float)
    assert found["cost_per_million"].keys() == {"prefill_computed", "prefill_cached", "decode"}
    assert found["simulation"]["agree"] or found["simulation"]["why"]
    assert found["target"] == {"ttft_ms": 2000.0, "tpot_ms": 30.0, "itl_p99_ms": None, "e2e_ms": None}


def test_text_fits_a_screen_and_leads_with_the_verdict(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = run(*QUICK, "--slo", "ttft=1s,tpot=25ms")
    assert re.match(r"(SPLIT|DO NOT SPLIT|MIX|INFEASIBLE)", text)
    assert "cost per million tokens" in text
    assert len(text.splitlines()) <= 40


def test_a_trace_is_stretched_to_the_rate():
    trace = DATA / "AzureLLMInferenceTrace_code.csv.xz"
    found = json.loads(
        run("plan", "--trace", str(trace), "--rate", "12", "--model", "llama-3-8b", "--no-simulation", "--json")
    )
    assert found["planned_rps"] == pytest.approx(12)
    assert found["workload"]["prompt"]["mean"] == pytest.approx(2048, abs=1)


def test_the_html_report_is_self_contained_and_well_formed(tmp_path):
    page = tmp_path / "report.html"
    run("plan", "--preset", "rag", "--model", "qwen3-32b", "--weights", "fp8", "--no-simulation", "--html", str(page))
    text = page.read_text()
    plots = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(plots) >= 4
    for plot in plots:
        ET.fromstring(plot)
    assert not re.search(r"(?:src|href)\s*=|<script|url\(|@import", text)
    assert "Break-even" in text


def test_a_shared_report_says_the_same_to_whoever_reads_it_again(tmp_path):
    page, data = tmp_path / "report.html", tmp_path / "plan.json"
    text = run(*QUICK, "--model", "qwen3-32b", "--html", str(page))
    assert run("plan", "--show", str(page)) == text
    data.write_text(run("plan", "--show", str(page), "--json"))
    assert run("plan", "--show", str(data)) == text
    data.write_text("[]")
    assert "is no report" in str(CliRunner().invoke(app, ["plan", "--show", str(data)]).exception)


def test_a_report_without_money_names_no_price(tmp_path):
    page = tmp_path / "report.html"
    secret = ["--price", "H100=1234.5", "--sell", "7.25,0.5,9.75", "--network-cost", "3.125"]
    text = run(*QUICK, "--model", "qwen3-32b", "--html", str(page), "--no-money", *secret)
    for told in (text, page.read_text()):
        assert "prices:" not in told
        assert "cost per" not in told
        assert not re.search(r"1234|9876|7\.25|3\.125", told)
    found = json.loads(run("plan", "--show", str(page), "--json"))
    assert found["money"] is None
    assert found["cost_per_million"] is None
    assert {option["price_per_hour"] for option in found["options"]} == {None}


def test_the_scheduler_file_is_toml_with_the_chosen_roles_and_costs(tmp_path):
    file = tmp_path / "scheduler.toml"
    answer = json.loads(run(*QUICK, "--slo", "ttft=1s,tpot=25ms", "--write", str(file), "--json"))
    written = tomllib.loads(file.read_text())
    assert written["pool"]["prefill"] == answer["prefill"]
    assert written["target"] == {"attainment": 0.9, "ttft_ms": 1000, "tpot_ms": 25}
    assert written["latency"].keys() == answer["latency"].keys()
    for role, costs in answer["latency"].items():
        assert written["latency"][role] == {name: cost for name, cost in costs.items() if cost is not None}


def test_the_users_price_replaces_the_default():
    cheap = json.loads(run(*QUICK, "--price", "H100=1.00", "--currency", "EUR", "--json"))
    assert cheap["money"]["currency"] == "EUR"
    assert cheap["money"]["per_hour"].keys() == {"prefill", "decode", "transfer", "scheduling_and_idle"}
    assert sum(cheap["money"]["per_hour"].values()) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "give one of --trace FILE"),
        (["--preset", "chat", "--prompt-tokens", "5"], "give one of --trace FILE"),
        (["--preset", "games"], "is not one of chat"),
        (["--prompt-tokens", "100", "--output-tokens", "10"], "rate, prompt tokens and output tokens must be above"),
        (["--trace", "/nonexistent/x.csv"], "No such file"),
        ([*QUICK[1:], "--gpus", "H100"], "not like 8xH100"),
        ([*QUICK[1:], "--gpus", "1xH100,1xH200,1xB200"], "at most two kinds"),
        ([*QUICK[1:], "--slo", "ttft=fast"], "not like ttft=2s"),
        ([*QUICK[1:], "--weights", "fp7"], "--weights: 'fp7' is not one of"),
        ([*QUICK[1:], "--price", "H100=cheap"], "not like H100=2.40"),
        ([*QUICK[1:], "--sell", "1,2"], "--sell"),
        ([*QUICK[1:], "--network", "fast"], "--network"),
        ([*QUICK[1:], "--model", "gpt-9"], "neither one of"),
        ([*QUICK[1:], "--measured", "/nonexistent/own.csv"], "No such file"),
        ([*QUICK[1:], "--fit", "/nonexistent/fit.toml"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, fault, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pdgate", "plan", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert fault in message
    assert len(message.strip().splitlines()) == 1


def test_targets_are_read_in_either_unit_and_order():
    target = parse_target(" tpot=30ms , TTFT=1.5s")
    assert (target.ttft_ms, target.tpot_ms) == (1500, 30)
    assert parse_target("tpot=30ms").ttft_ms is None
    assert parse_target("none").tpot_ms is None
    for wrong in ("ttft=0s", "ttft=1s,ttft=2s", "ttft=1", ""):
        with pytest.raises(WorkloadError):
            parse_target(wrong)


def test_own_measurements_change_the_answer(tmp_path):
    """On a system that decodes three times slower than the fit says, fewer requests keep TPOT."""
    file = tmp_path / "own.csv"
    rows = "".join(f"4,{c},1000,200,{40 + c}\n" for c in (1, 8, 32))
    file.write_text("gpus,concurrency,prompt_tokens,output_tokens,tpot_ms\n" + rows)
    asked = [*QUICK, "--slo", "ttft=2s,tpot=60ms", "--json"]
    shipped = json.loads(run(*asked))
    own = json.loads(run(*asked, "--measured", str(file)))
    assert any("factors moved towards 3 measurements of yours" in text for text in own["assumptions"])
    assert own["options"][0]["capacity_rps"] < 0.8 * shipped["options"][0]["capacity_rps"]
