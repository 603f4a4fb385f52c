"""`pdgate bench` against the whole stack with timed workers."""

import asyncio
import json

from typer.testing import CliRunner

from pdgate.bench.command import EXIT_INVALID
from pdgate.bench.records import read_run
from pdgate.cli import app


async def pdgate(*arguments: str, environ: dict[str, str]) -> str:
    """Run a command. `bench` may say that this client did not keep up, which on a loaded machine is true."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environ)
    assert result.exit_code in (0, EXIT_INVALID), (result.output[-2000:], result.exception)
    return result.stdout


async def test_bench_measures_the_stack_and_compares_its_runs(stack, tmp_path):
    stack.start()
    await stack.ready()
    environ = {"PDGATE_URL": stack.url, "PDGATE_API_KEY": stack.api_key, "COLUMNS": "160"}
    environ |= {"PDGATE_DATA": str(tmp_path)}
    rows = [
        {"timestamp": n * 20, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 100 + n]} for n in range(24)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    replayed, closed = tmp_path / "replayed.json", tmp_path / "closed.json"
    exact = ("--prompt-tokens", "64", "--output-tokens", "8", "--requests", "24", "--slo", "ttft=20s,tpot=5s")
    found = json.loads(await pdgate("bench", "--trace", str(trace), "--json", "--out", str(replayed), environ=environ))
    step = found["steps"][0]
    assert (found["model"], found["priced_by"], found["currency"]) == ("tiny", "endpoint", "EUR")
    assert (step["requests"], step["errors"], step["counted_by_server"]) == (24, {}, 1.0)
    assert step["mean_output_tokens"] == 4
    assert abs(step["mean_prompt_tokens"] - 1100) < 110  # by its own measure of a tokenizer it knows nothing of
    assert step["cached_share"] > 0.3  # two of three blocks are those of all others, once one of them has been computed
    records = read_run(replayed).steps[0].records
    assert step["cost_nano"] == sum(record.cost_nano for record in records) > 0
    assert {record.path for record in records} == {"pd"}
    text = await pdgate(
        *("bench", "--concurrency", "4,8", *exact, "--out", str(closed), "--html", str(tmp_path / "r.html")),
        environ=environ,
    )
    assert "simulated engine" in text
    assert text.count("met 100.0%") == 2
    assert (tmp_path / "r.html").read_text().count("<h2>") == 4  # two steps, two distributions
    told = await pdgate("bench", "compare", str(closed), str(closed), "--json", environ=environ)
    answer = json.loads(told)
    assert [one["step"] for one in answer] == ["4 at once", "8 at once"]
    assert not any(difference["real"] for one in answer for difference in one["differences"])
