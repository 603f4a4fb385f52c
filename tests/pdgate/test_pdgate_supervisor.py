"""Children are kept running, stopped in order, and their logs stay small."""

import asyncio
import sys

from pdgate.children import Children, ChildSpec, Reaper, last_line, open_log
from pdgate.supervisor import STAGE_BEHIND, STAGE_GATEWAY, Supervisor, describe_exit
from tests.processes import until

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def spec(name, program, *arguments, stage=STAGE_GATEWAY):
    return ChildSpec(name=name, argv=(sys.executable, "-c", program, *arguments), env={}, stage=stage)


def has_written(logs, name):
    return (logs / f"{name}.log").exists() and "up" in (logs / f"{name}.log").read_text()


def says(lines, word):
    return any(word in line for line in lines)


async def test_a_child_that_dies_is_started_again_and_said_in_one_line(tmp_path):
    said = []
    with (tmp_path / "lock").open("a") as lock:
        reaper = Reaper(lock)
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(tasks, Children(tmp_path, reaper), said.append)
            supervisor.keep(spec("worker", "print('out of memory', flush=True); raise SystemExit(3)"))
            await until(lambda: says(said, "starting it again in 1.0 s"))
            await supervisor.stop()
        reaper.close()
    assert "worker ended (exit code 3); starting it again in 0.5 s." in said[0]
    assert "out of memory" in said[0]
    assert "\n" not in said[0]


async def test_stages_stop_in_order_and_what_ignores_sigterm_is_killed(tmp_path):
    said = []
    order = tmp_path / "order"
    last = (
        f"import signal, sys, time\n"
        f"def stop(*_): open({str(order)!r}, 'a').write(sys.argv[1]); sys.exit()\n"
        f"signal.signal(signal.SIGTERM, stop)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    with (tmp_path / "lock").open("a") as lock:
        reaper = Reaper(lock)
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(tasks, Children(tmp_path, reaper), said.append)
            names = ("billing", "gateway", "stubborn")
            supervisor.keep(spec("billing", last, "b", stage=STAGE_BEHIND))
            supervisor.keep(spec("gateway", last, "g", stage=STAGE_GATEWAY))
            supervisor.keep(spec("stubborn", STUBBORN, stage=STAGE_BEHIND))
            await until(lambda: all(has_written(tmp_path, name) for name in names))
            await supervisor.stop()
        reaper.close()
    assert order.read_text() == "gb"
    assert said == []


async def test_a_program_that_is_missing_is_said_and_tried_again(tmp_path):
    said = []
    with (tmp_path / "lock").open("a") as lock:
        reaper = Reaper(lock)
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(tasks, Children(tmp_path, reaper), said.append)
            supervisor.keep(ChildSpec(name="ghost", argv=(str(tmp_path / "no-such"),), env={}, stage=0))
            await until(lambda: says(said, "could not start"))
            await supervisor.stop()
        reaper.close()


def test_an_overgrown_log_is_put_aside_at_start(tmp_path):
    (tmp_path / "gateway.log").write_bytes(b"x" * (9 << 20))
    with open_log(tmp_path, "gateway") as log:
        log.write(b"fresh\nlast words\n\n")
    assert (tmp_path / "gateway.log.1").stat().st_size == 9 << 20
    assert last_line(tmp_path / "gateway.log") == "last words"


def test_exit_codes_are_told_in_words():
    assert describe_exit(2) == "exit code 2"
    assert describe_exit(-9) == "signal SIGKILL"
