"""What runs on Ray's machines, without Ray: a worker's keeper, and the shelf of last words."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from contracts.lifecycle import Role
from scheduler.fleet.launch import Launch
from scheduler.fleet.protocol import InstanceState, WorkerSpec
from scheduler.fleet.ray import _fitting
from scheduler.fleet.ray_worker import Here, Keeper, Shelf, launch_here

WITHIN_S = 60.0
SPEC = WorkerSpec(worker_id="w-1", pool="p", role=Role.DECODE)
SAYS_AND_WAITS = (
    "import os, time\nprint(os.environ['WORKER_ID'], os.environ['HOST'], os.getpid(), flush=True)\ntime.sleep(600)"
)


def launch(program=SAYS_AND_WAITS, **more):
    env = {"PATH": os.environ["PATH"], "HOST": "{host}"}
    return Launch(argv=(sys.executable, "-I", "-S", "-c", program), env=env, max_workers=8, **more)


def until(check):
    deadline = time.monotonic() + WITHIN_S
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def keeper(tmp_path, *, again=False):
    return Keeper(SPEC, launch(), zone="a", logs=str(tmp_path), here=lambda: Here(host="192.0.2.7", again=again))


def test_a_keeper_starts_its_worker_again_and_tells_when_it_has_ended(tmp_path):
    one = keeper(tmp_path)
    said = until(lambda: one.tail(1000)).split()
    assert said[:2] == ["w-1", "192.0.2.7"]
    assert one.tell().restarts == 0
    os.kill(int(said[2]), signal.SIGKILL)
    until(lambda: (now := one.tell()).state is InstanceState.RUNNING and now.restarts == 1)
    one.stop(0.2)
    until(lambda: one.tell() is None)
    assert one.tail(10_000).count("w-1") >= 1  # its last words stay


def test_a_keeper_that_ran_elsewhere_counts_that(tmp_path):
    one = keeper(tmp_path, again=True)
    assert until(one.tell).restarts == 1
    one.stop(0.1)
    until(lambda: one.tell() is None)


def test_a_worker_dies_with_its_keeper(tmp_path):
    program = (
        "import sys, time\n"
        "sys.path[:0] = [sys.argv[1]]\n"
        "from tests.scheduler_fleet.test_ray_worker import keeper\n"
        "from pathlib import Path\n"
        "one = keeper(Path(sys.argv[2]))\n"
        "while not one.tail(1000): time.sleep(0.01)\n"
        "print(one.tail(1000), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(Path.cwd()), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        worker = psutil.Process(int(parent.stdout.readline().split()[2]))
        parent.kill()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_accelerators_that_ray_chose_are_passed_on_where_some_were_asked_for():
    environ = {"CUDA_VISIBLE_DEVICES": "3", "OTHER": "x"}
    with_gpu = launch_here(launch(resources={"GPU": 1}), zone="b", host="h", environ=environ)
    assert with_gpu.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert with_gpu.zones == ("b",)
    assert "OTHER" not in with_gpu.env
    without = launch_here(launch(resources={"CPU": 1}), zone="", host="h", environ=environ)
    assert "CUDA_VISIBLE_DEVICES" not in without.env


@pytest.mark.parametrize(
    ("total", "taken", "bundle", "fits"),
    [
        ({"CPU": 8, "GPU": 2}, {}, {"CPU": 2, "GPU": 1}, 2),  # accelerators are the bound
        ({"CPU": 8, "GPU": 8}, {"CPU": 5}, {"CPU": 2, "GPU": 1}, 1),
        ({"CPU": 1.0}, {"CPU": 0.9}, {"CPU": 0.1}, 1),  # 1.0 - 0.9 is a little less than 0.1
        ({"CPU": 8}, {}, {"GPU": 1}, 0),
        ({"CPU": 2}, {"CPU": 4}, {"CPU": 1}, 0),  # Ray lets others take more than there is
    ],
)
def test_as_many_workers_fit_as_the_scarcest_resource_lets_in(total, taken, bundle, fits):
    assert _fitting(total, taken, bundle) == fits


def test_the_shelf_keeps_the_newest():
    shelf = Shelf()
    for number in range(600):
        shelf.put(f"w-{number}", f"said {number}")
    shelf.put("w-100", "again")
    assert shelf.get("w-99") is None
    assert shelf.get("w-100") == "again"
    assert shelf.get("w-599") == "said 599"
