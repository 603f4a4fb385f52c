"""What a killed stack leaves behind: nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from pdgate.children import Reaper
from pdgate.preflight import CannotStart, take_lock

REPOSITORY = Path(__file__).parents[2]

# A stack in small: a child in its own session that has a child in the same group.
STACK = """
import subprocess, sys, time
from pathlib import Path
from pdgate.children import Reaper
lock = open(sys.argv[1], "a")
reaper = Reaper(lock)
grandchild = "import time; time.sleep(600)"
child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]);" \\
        " print(p.pid, flush=True); time.sleep(600)"
argv = [sys.executable, "-c", child, grandchild]
p = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
reaper.watch(p.pid)
print(p.pid, p.stdout.readline().strip(), flush=True)
time.sleep(600)
"""


def wait_until(check, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.02)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_parent_takes_children_and_grandchildren_with_it(tmp_path):
    stack = subprocess.Popen(
        [sys.executable, "-c", STACK, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    child, grandchild = map(int, stack.stdout.readline().split())
    assert not gone(child)
    assert not gone(grandchild)
    stack.kill()
    stack.wait()
    wait_until(lambda: gone(child) and gone(grandchild))


def test_a_reaper_that_was_killed_is_replaced_and_told_what_runs(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with (tmp_path / "lock").open("a") as lock:
        reaper = Reaper(lock)
        reaper.watch(sleeper.pid)
        reaper._process.kill()
        reaper._process.wait()
        reaper.revive()
        reaper.close()
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_group_that_has_gone_is_not_killed_again(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with (tmp_path / "lock").open("a") as lock:
        reaper = Reaper(lock)
        reaper.watch(sleeper.pid)
        reaper.forget(sleeper.pid)
        reaper.close()
    assert sleeper.poll() is None
    os.killpg(sleeper.pid, signal.SIGKILL)
    sleeper.wait()


def test_a_second_stack_on_the_same_data_is_refused_with_the_first_one_named(tmp_path):
    file = tmp_path / "lock"
    with take_lock(file), pytest.raises(CannotStart, match=rf"process {os.getpid()}\): stop it"):
        take_lock(file)
    take_lock(file).close()  # free again


def test_the_reaper_needs_only_the_standard_library(tmp_path):
    """It starts in milliseconds, from any folder, whatever the environment."""
    program = textwrap.dedent(
        """
        import sys
        before = set(sys.modules)
        sys.argv = [sys.argv[1]]
        import runpy
        runpy.run_path(sys.argv[0], run_name="reaper")
        assert not {m for m in sys.modules if m.startswith(("msgspec", "pdgate", "psutil"))}
        """
    )
    file = REPOSITORY / "pdgate" / "reaper.py"
    subprocess.run([sys.executable, "-I", "-S", "-c", program, str(file)], check=True, cwd=tmp_path, timeout=30)
