"""How often each thread of each process runs for one request, what that costs, and who woke it.

The counts are the kernel's own (/proc/PID/task/*/schedstat). With `--by` also who wakes whom, which needs `perf` and
the right to trace the scheduler's events (root, as a rule). What the stack does for nothing is measured first, and
stays in.
"""

import argparse
import asyncio
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import psutil
from rich.console import Console
from rich.table import Table

from benches import load
from benches.__main__ import CATALOG, INSTANT, MODEL, PROMPT, services
from pdgate.models import timed_models
from pdgate.services import Service
from tests.processes import Stack

_IDLE_S = 5.0
_EVENT = re.compile(r"\s*(.+?)\s+(\d+)\s+\[\d+\].*sched_waking:.*\bpid=(\d+)")
_SHOWN = 0.05  # of a run or a wake-up a request


class Thread(NamedTuple):
    """Threads of one process with one name."""

    process: str
    name: str


class Ran(NamedTuple):
    """What a thread has done since it began."""

    runs: int
    cpu_ns: int

    def __sub__(self, before: object) -> "Ran":
        assert isinstance(before, Ran)
        return Ran(self.runs - before.runs, self.cpu_ns - before.cpu_ns)


def threads_of(pids: Mapping[str, int]) -> Iterator[tuple[Path, Thread]]:
    """Yield each thread of the processes and of their children."""
    for process, pid in pids.items():
        root = psutil.Process(pid)
        for one in (root, *root.children(recursive=True)):
            for task in Path(f"/proc/{one.pid}/task").glob("*"):
                main = task.name == str(one.pid)
                yield task, Thread(process, "main" if main else (task / "comm").read_text().strip())


def ran(pids: Mapping[str, int]) -> dict[Thread, Ran]:
    """Return what the threads have done, added up by process and name."""
    found: dict[Thread, Ran] = {}
    for task, thread in threads_of(pids):
        cpu_ns, _, runs = (int(number) for number in (task / "schedstat").read_text().split())
        before = found.get(thread, Ran(0, 0))
        found[thread] = Ran(before.runs + runs, before.cpu_ns + cpu_ns)
    return found


async def requests(stack: Stack, connections: int, each: int, tokens: int) -> list[load.Stream]:
    """Send requests, so many at once."""
    one = load.chat_request(f"127.0.0.1:{stack.gateway_port}", stack.api_key, MODEL, prompt=PROMPT, max_tokens=tokens)
    streams = await load.run("127.0.0.1", stack.gateway_port, [[one] * each for _ in range(connections)])
    failed = [stream for stream in streams if stream.status != 200]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(streams)} failed: {failed[0].status} {bytes(failed[0].body)!r}")
    return streams


def show(before: dict[Thread, Ran], after: dict[Thread, Ran], idle: dict[Thread, Ran], number: int, unit: str) -> None:
    """Print what `number` requests or tokens had each thread do."""
    done = {thread: now - before.get(thread, Ran(0, 0)) for thread, now in after.items()}
    table = Table(title=f"Per {unit}, of {number}; idle per second")
    for column in ("process", "thread", "runs", "CPU us", "idle runs", "idle CPU us"):
        table.add_column(column, justify="left" if column in ("process", "thread") else "right")

    def row(process: str, name: str, one: Ran, nothing: Ran) -> None:
        table.add_row(
            process,
            name,
            f"{one.runs / number:.2f}",
            f"{one.cpu_ns / number / 1000:,.0f}" if unit == "request" else f"{one.cpu_ns / number / 1000:,.1f}",
            f"{nothing.runs / _IDLE_S:.0f}",
            f"{nothing.cpu_ns / _IDLE_S / 1000:,.0f}",
        )

    def total(of: dict[Thread, Ran]) -> Ran:
        return Ran(sum(one.runs for one in of.values()), sum(one.cpu_ns for one in of.values()))

    for thread, one in sorted(done.items()):
        nothing = idle.get(thread, Ran(0, 0))
        if one.runs / number >= _SHOWN or nothing.runs / _IDLE_S >= 1:
            row(thread.process, thread.name, one, nothing)
    row("all", "", total(done), total(idle))
    Console(width=110).print(table)


class Wakes:
    """Traces who wakes whom while it is entered."""

    def __init__(self, pids: Mapping[str, int], folder: Path) -> None:
        self._names = {int(task.name): f"{t.process} {t.name}" for task, t in threads_of(pids)}
        self._file = folder / "wakes.data"
        self._perf: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        argv = ["perf", "record", "-q", "-a", "-m", "4096", "-e", "sched:sched_waking", "-o", str(self._file)]
        self._perf = subprocess.Popen(argv)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._perf is not None
        self._perf.terminate()
        self._perf.wait(30)

    def show(self, number: int) -> None:
        """Print the wake-ups a request."""
        argv = ["perf", "script", "-i", str(self._file), "-F", "comm,tid,cpu,event,trace"]
        text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        seen: Counter[tuple[str, str]] = Counter()
        for line in text.splitlines():
            event = _EVENT.match(line)
            if event is None or int(event[3]) not in self._names:
                continue
            # What wakes by itself is a timer, or somebody outside: the interrupt found another process running.
            seen[self._names[int(event[3])], self._names.get(int(event[2]), "a timer or the client")] += 1
        table = Table(title=f"Wake-ups a request, of {number}")
        for column in ("who is woken", "by", "times"):
            table.add_column(column, justify="right" if column == "times" else "left")
        for (woken, by), times in sorted(seen.items(), key=lambda item: (item[0][0], -item[1])):
            if times / number >= _SHOWN:
                table.add_row(woken, by, f"{times / number:.2f}")
        Console(width=110).print(table)


async def run(arguments: argparse.Namespace, folder: Path, valkey: Service, postgres: Service) -> None:
    """Start everything, send the load, print the tables."""
    stack = Stack(
        folder=folder,
        redis_url=valkey.url,
        database_url=postgres.url,
        catalog_file=folder / "models.toml",
        models_dir=timed_models(folder / "models", {MODEL}),
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    environ = {"WORKER_STEP_MS": str(arguments.step_ms), **INSTANT}
    stack.add_worker("prefill-0", role="prefill", environ=environ)
    stack.add_worker("decode-0", role="decode", environ=environ)
    stack.start()
    try:
        await stack.ready()
        pids = {name: process.pid for name, process in stack.processes.items()}
        pids |= {"valkey": valkey.process.pid, "postgres": postgres.process.pid}
        await requests(stack, arguments.at_once, 3, arguments.tokens)
        before = ran(pids)
        await asyncio.sleep(_IDLE_S)
        idle = {thread: now - before.get(thread, Ran(0, 0)) for thread, now in ran(pids).items()}
        before = ran(pids)
        streams = await requests(stack, arguments.at_once, arguments.each, arguments.tokens)
        unit = "request" if arguments.tokens == 1 else "token"
        show(before, ran(pids), idle, len(streams) * (arguments.tokens if unit == "token" else 1), unit)
        print(f"first byte, median: {statistics.median(stream.ttfb_ms for stream in streams):.2f} ms")
        if arguments.by:
            with Wakes(pids, folder) as wakes:
                streams = await requests(stack, arguments.at_once, arguments.each, arguments.tokens)
            wakes.show(len(streams))
    finally:
        stack.stop()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=1, help="connections (default 1)")
    parser.add_argument("--each", type=int, default=400, help="requests of each, one after the other (default 400)")
    parser.add_argument("--tokens", type=int, default=1, help="of each answer (default 1)")
    parser.add_argument("--step-ms", type=float, default=1.0, help="of a decode step (default 1)")
    parser.add_argument("--by", action="store_true", help="trace who wakes whom, too")
    arguments = parser.parse_args()
    if arguments.by and shutil.which("perf") is None:
        sys.exit("--by needs perf")
    folder = Path(tempfile.mkdtemp(prefix="pdgate-wakes-"))
    try:
        folder.chmod(0o755)
        (folder / "models.toml").write_text(CATALOG)
        with services(folder) as (valkey, postgres):
            asyncio.run(run(arguments, folder, valkey, postgres))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
