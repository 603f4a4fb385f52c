"""What serving processes do about their heap."""

import subprocess
import sys

PROGRAM = """
import gc
from observability import heap

heap.begin()
heap.settle()
print(gc.get_freeze_count() > 0, gc.get_threshold()[0] > 700)
"""


def test_what_lives_as_long_as_the_process_is_not_looked_through_again():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "True"]
