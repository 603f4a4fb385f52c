"""The ratio controller before a judge that is not ours: `python -m benches.referee [--row NAME] [--seeds N]`.

NVIDIA Dynamo's mocker replays the loads of the bars. Our policy, as production and simulator drive it, is its scaling
policy through a thin adapter; then Dynamo's own planner in each of a stated grid of settings, every static split near
the best, and always-unified. The planner of ai-dynamo 1.6.1 asks for a package that PyPI has as a stub only, so
everything is played in 1.4.2, too, whose planner runs. Every run is kept in `--kept` and not played again until what it
depends on changes, so an interrupted command goes on where it was. `--ours` plays our policy only and keeps the results
of the others.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

import scheduler.policy
from benches.bar_loads import ROWS, TARGET, WORKERS, Load
from benches.mocker import MOCKER, WITH_PLANNER, Mocker
from benches.mocker_trace import write_trace
from benches.referee.found import RESULTS, Figure, Found, Measured, read
from benches.referee.questions import Answer, Kind, Question
from benches.referee.table import grid_table, release_table

KEPT = Path(".bars")
FIRST_SEED = 100
LOADS = {
    "conversation": 900.0,
    "azure-conv": 180.0,
    "azure-code": 300.0,
    "regimes-600": 1200.0,
    "regimes-300": 900.0,
}
"""Loads of the bars, and how many of their seconds are played."""
CHUNKS = (2048, 8192)
START_S = 5.0
RELEASES = {"1.4.2": WITH_PLANNER, "1.6.1": MOCKER}
"""Of ai-dynamo, and the environments that have them."""
_PLANNER: dict[str, str | int | float | bool] = {
    "mode": "disagg",
    "backend": "mocker",
    "prefill_engine_num_gpu": 1,
    "decode_engine_num_gpu": 1,
    "max_gpu_budget": WORKERS,
    "live_dashboard_port": 0,
}
_SLA: dict[str, str | int | float | bool] = {
    "optimization_target": "sla",
    "ttft": TARGET.ttft_ms or 0.0,
    "itl": TARGET.tpot_ms or 0.0,
    "enable_load_scaling": True,
    "enable_throughput_scaling": False,
}
_ALL: dict[str, str | int | float | bool] = {"min_gpu_budget": WORKERS}
GRID: dict[str, dict[str, str | int | float | bool]] = {
    "throughput": {"optimization_target": "throughput"},
    "throughput, all workers": {"optimization_target": "throughput", **_ALL},
    "latency, all workers": {"optimization_target": "latency", **_ALL},
    "sla": _SLA,
    "sla, all workers": {**_SLA, **_ALL},
    "sla, all workers, every 30 s": {**_SLA, **_ALL, "load_adjustment_interval_seconds": 30},
}
"""Settings of Dynamo's planner that are tried, by name: what it aims at, whether it may let workers go, how often."""


class Bench:
    """Plays what has not been played yet."""

    def __init__(self, release: str, kept: Path, folder: Path, console: Console) -> None:
        self._release = release
        self._mocker = Mocker("benches.referee.player", peer=RELEASES[release])
        self._kept = kept
        self._folder = folder
        self._console = console
        self._policy = _fingerprint()
        kept.mkdir(parents=True, exist_ok=True)

    def measure(self, name: str, load: Load, seed: int, before: Measured | None = None) -> Measured:
        """Play one load under every policy; given what was found `before`, under ours only."""
        arrivals = [arrival for arrival in load(seed) if arrival.at_s < LOADS[name]]
        trace = self._folder / f"{name}-{seed}.jsonl"
        start_s = arrivals[0].at_s
        write_trace(trace, ((a.at_s - start_s, a.prompt_tokens, a.output_tokens) for a in arrivals))
        length_s = arrivals[-1].at_s - start_s
        content = hashlib.sha256(trace.read_bytes()).hexdigest()

        def play(kind: Kind, what: str, **of: object) -> Figure:
            question = msgspec.convert(
                {"trace": str(trace), "kind": kind, "ttft_ms": TARGET.ttft_ms, "tpot_ms": TARGET.tpot_ms,
                 "start_s": START_S, **of},
                Question,
            )  # fmt: skip
            answer = self._answer(question, content)
            figure = _figure(answer, length_s)
            self._console.print(
                f"{self._release} {name} {seed} {what}: {figure.attainment:.1%}, {figure.moved} started or stopped, "
                f"{answer.cpu_s:.1f} s of CPU",
                style="dim",
            )
            return figure

        middle = WORKERS // 2
        ratio = play(Kind.RATIO, "ours", prefill=middle, decode=WORKERS - middle)
        if before is not None:
            return msgspec.structs.replace(before, ratio=ratio)
        planners = {}
        for setting, settings in GRID.items() if RELEASES[self._release] == WITH_PLANNER else ():
            planners[setting] = play(
                Kind.PLANNER, setting, prefill=middle, decode=WORKERS - middle, settings=_PLANNER | settings
            )
        statics: dict[int, Figure] = {}
        at = middle
        while True:
            for near in (at - 1, at, at + 1):
                if 0 < near < WORKERS and near not in statics:
                    statics[near] = play(Kind.STATIC, f"{near}P{WORKERS - near}D", prefill=near, decode=WORKERS - near)
            better = max(statics, key=lambda p: statics[p].attainment)
            if better == at:
                break
            at = better
        return Measured(
            release=self._release,
            load=name,
            seed=seed,
            requests=len(arrivals),
            ratio=ratio,
            statics={f"{p}P{WORKERS - p}D": statics[p] for p in sorted(statics)},
            unified={
                str(chunk): play(Kind.UNIFIED, f"unified, {chunk} a step", unified=WORKERS, chunk_tokens=chunk)
                for chunk in CHUNKS
            },
            planners=planners,
        )

    def end(self) -> None:
        """Let the mocker end."""
        self._mocker.end()

    def _answer(self, question: Question, content: str) -> Answer:
        """Return a run, from the file if it is there."""
        asked = msgspec.json.encode(msgspec.structs.replace(question, trace=content))
        code = self._policy if question.kind is Kind.RATIO else ""
        digest = hashlib.sha256(asked + code.encode() + self._release.encode()).hexdigest()[:16]
        file = self._kept / f"referee-{digest}.json"
        if not file.exists():
            file.write_text(self._mocker.ask(msgspec.json.encode(question).decode()))
        return msgspec.json.decode(file.read_bytes(), type=Answer)


def _figure(answer: Answer, length_s: float) -> Figure:
    told, guessed = answer.told or (1, 0)
    return Figure(
        attainment=round(answer.attainment, 5),
        goodput_rps=round(answer.met / length_s, 3),
        late=answer.late + answer.requests - answer.completed,
        slow=answer.slow,
        moved=answer.moved,
        decisions=answer.wished,
        changes=[f"{change.at_s:.0f} s: {change.what}" for change in answer.changes],
        told=round(told / max(1, told + guessed), 4),
    )


def _fingerprint() -> str:
    """Return a hash of the policy and of the adapter."""
    digest = hashlib.sha256()
    for folder in (Path(scheduler.policy.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.glob("*.py")):
            if file.name not in ("__main__.py", "table.py", "found.py", "capped.py"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Play what is asked for, write the results."""
    parser = argparse.ArgumentParser(prog="python -m benches.referee", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", choices=list(LOADS), help="only this load")
    parser.add_argument("--release", choices=list(RELEASES), help="only this release of ai-dynamo")
    parser.add_argument("--seeds", type=int, default=1, help="seeds per load (default 1), from 100 on")
    parser.add_argument("--development", action="store_true", help="seeds from 1 on; nothing is written")
    parser.add_argument("--ours", action="store_true", help="our policy only, beside the others' results")
    parser.add_argument("--kept", type=Path, default=KEPT, help="directory of finished runs")
    parser.add_argument("--budget", type=float, default=840.0, help="begin no load after so many seconds")
    options = parser.parse_args()
    console = Console(highlight=False)
    first = 1 if options.development else FIRST_SEED
    ends_s = time.monotonic() + options.budget
    found = Found(
        workers=WORKERS,
        ttft_ms=TARGET.ttft_ms or 0.0,
        tpot_ms=TARGET.tpot_ms or 0.0,
        start_s=START_S,
        grid=GRID,
        rows=read().rows if RESULTS.exists() and not options.development else [],
    )
    with tempfile.TemporaryDirectory() as folder:
        for release in [options.release] if options.release else list(RELEASES):
            bench = Bench(release, options.kept, Path(folder), console)
            for seed in range(first, first + options.seeds):
                for row in ROWS:
                    if row.name not in LOADS or options.row not in (None, row.name):
                        continue
                    if time.monotonic() > ends_s:
                        console.print(f"stopped before {release} {row.name} {seed}: run the same command again")
                        sys.exit(1)
                    named = (release, row.name, seed)
                    known = {(m.release, m.load, m.seed): m for m in found.rows} if options.ours else {}
                    found = _with(found, bench.measure(row.name, row.load, seed, known.get(named)))
                    if not options.development:
                        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
            bench.end()
    for release in RELEASES:
        if found.of_release(release):
            console.print(f"ai-dynamo {release}\n{release_table(found, release)}")
    console.print(grid_table(found))


def _with(found: Found, measured: Measured) -> Found:
    named = (measured.release, measured.load, measured.seed)
    kept = [m for m in found.rows if (m.release, m.load, m.seed) != named]
    names = list(RELEASES)
    rows = sorted([*kept, measured], key=lambda m: (names.index(m.release), list(LOADS).index(m.load), m.seed))
    return msgspec.structs.replace(found, rows=rows)


if __name__ == "__main__":
    main()
