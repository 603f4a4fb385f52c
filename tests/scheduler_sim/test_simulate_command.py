"""`pdgate simulate`: its names, its figures, its pictures, its refusals."""

import json
import struct
import zlib
from xml.etree import ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from contracts.lifecycle import HandOff
from pdgate.preflight import CannotStart
from pdgate.simulate import parse_policy, simulate
from scheduler.simulator.play import Policy

app = typer.Typer()
app.command()(simulate)
LOAD = ["--rate", "20", "--duration", "30", "--slo", "ttft=2s,tpot=30ms"]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


@pytest.mark.parametrize("policy", ["auto", "static:4/4", "auto:3/3/2", "unified", "threshold", "planner"])
@pytest.mark.parametrize("hand_off", ["direct", "store"])
def test_json_has_the_fixed_names(policy, hand_off):
    got = run(*LOAD, "--policy", policy, "--hand-off", hand_off, "--json")
    assert got.exit_code == 0, got.output
    figures = json.loads(got.stdout)
    assert {"attainment", "goodput_rps", "flips", "requests", "ttft_ms", "tpot_ms"} <= figures.keys()
    assert set(figures["ttft_ms"]) == set(figures["tpot_ms"]) == {"p50", "p95", "p99"}
    assert figures["requests"] == pytest.approx(600, rel=0.2)
    assert 0 <= figures["attainment"] <= 1


def test_a_table_shows_the_figures_and_their_course():
    got = run(*LOAD)
    assert got.exit_code == 0
    assert "goodput_rps" in got.stdout
    assert "over time" in got.stdout


def test_a_trace_is_played_at_the_rate_asked_for(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i * 100, "input_length": 900, "output_length": 20, "hash_ids": [1, i + 2]} for i in range(200)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    slow = json.loads(run("--trace", str(file), "--json").stdout)
    fast = json.loads(run("--trace", str(file), "--rate", "40", "--json").stdout)
    assert slow["requests"] == fast["requests"] == 200
    assert slow["duration_s"] == pytest.approx(19.9, abs=0.2)
    assert fast["duration_s"] == pytest.approx(5.0, abs=0.2)


def test_pictures_are_well_formed(tmp_path):
    svg, png = tmp_path / "course.svg", tmp_path / "course.png"
    for file in (svg, png):
        assert run(*LOAD, "--plot", str(file), "--json").exit_code == 0
    texts = [element.text for element in ET.parse(svg).iter() if element.tag.endswith("text")]
    assert {"targets met, %", "ready workers", "requests waiting"} <= set(texts)
    raw = png.read_bytes()
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", raw[16:24])
    length = struct.unpack(">I", raw[33:37])[0]
    assert len(zlib.decompress(raw[41 : 41 + length])) == height * (1 + 3 * width)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--trace FILE or --rate"),
        ([*LOAD, "--policy", "best"], "not one of"),
        ([*LOAD, "--policy", "static:4/3"], "7 workers"),
        ([*LOAD, "--policy", "static:8/0"], "serve nothing"),
        ([*LOAD, "--policy", "static:x/y"], "not like"),
        (["--rate", "5", "--slo", "fast"], "ttft=2s"),
        ([*LOAD, "--plot", "course.pdf"], ".svg or .png"),
        (["--trace", "/nowhere/trace.csv"], "No such file"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, says):
    got = run(*arguments)
    assert isinstance(got.exception, CannotStart)
    assert says in str(got.exception)


def test_policies_begin_where_they_say():
    assert [str(parse_policy(text, 8)[1]) for text in ("auto", "static:6/2", "unified", "threshold")] == [
        "4P4D0U",
        "6P2D0U",
        "0P0D8U",
        "4P4D0U",
    ]
    assert str(parse_policy("auto", 8, HandOff.STORE)[1]) == "4P3D1U"
    assert parse_policy("static", 8)[0] is Policy.STATIC
