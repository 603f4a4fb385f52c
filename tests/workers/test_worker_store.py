"""The folder of KV pages: what is found there, and what keeps it small."""

import fcntl
import os
from pathlib import Path

import pytest

from contracts.lifecycle import Phase
from contracts.wire import Attempt, Sampling, pack_ids
from workers.engine import Job
from workers.engines.timed_request import TimedRequest
from workers.engines.timed_store import PAGE_TOKENS, TimedStore
from workers.store_sweeper import StoreSweeper

IDS = pack_ids(range(100))


def test_pages_are_found_by_whoever_has_the_same_scope_and_salt(tmp_path: Path):
    store = TimedStore("pool-r1", folder=tmp_path)
    store.add(IDS, "tenant")
    assert TimedStore("pool-r1", folder=tmp_path).match(IDS, "tenant") == (96, True)
    assert TimedStore("pool-r1", folder=tmp_path).match(IDS, "another") == (0, True)
    assert TimedStore("pool-r2", folder=tmp_path).match(IDS, "tenant") == (0, True)
    assert store.match(IDS[: 4 * PAGE_TOKENS], "tenant") == (0, True)  # the last token is always computed
    assert store.match(pack_ids([*range(20), 7, *range(21, 100)]), "tenant") == (16, True)


def test_a_page_that_says_something_else_is_found_out(tmp_path: Path):
    store = TimedStore("pool-r1", folder=tmp_path)
    store.add(IDS, "")
    next(tmp_path.glob("*.page")).write_bytes(b"\xff" * 12)
    assert store.match(IDS, "") == (96, False)


@pytest.mark.parametrize(("admitted_s", "load_ms"), [(10.0, 80.0), (10.03, 50.0), (11.0, 0.0)])
def test_a_request_that_waits_for_its_turn_has_its_pages_fetched_meanwhile(admitted_s: float, load_ms: float):
    job = Job(
        attempt=Attempt("r", 1), phase=Phase.UNIFIED, gateway_id="g", deadline_unix_ms=0, prompt=IDS,
        sampling=Sampling(max_tokens=1),
    )  # fmt: skip
    request = TimedRequest(job, None, accepted_s=10.0)
    request.fetch(80.0, admitted_s)
    assert request.load_ms == pytest.approx(load_ms)


def pages(folder: Path, *ages_s: float, size: int = 1000) -> list[Path]:
    """One page per age; the first is named 0."""
    folder.mkdir(exist_ok=True)
    made = []
    for number, age_s in enumerate(ages_s):
        page = folder / f"{number}.bin"
        page.write_bytes(bytes(size))
        os.utime(page, (1000.0 - age_s, 1000.0 - age_s))
        made.append(page)
    return made


def test_the_least_recently_used_pages_go_first_whatever_revision_they_are_of(tmp_path: Path):
    old = pages(tmp_path / "pool-r1", 50, 10)
    new = pages(tmp_path / "pool-r2", 40, 30, 20)
    swept = StoreSweeper(tmp_path, 4000).sweep()
    assert (swept.num_bytes, swept.num_pages, swept.removed_bytes) == (3000, 3, 2000)  # down to nine tenths
    assert [p.exists() for p in (*old, *new)] == [False, True, False, True, True]
    assert StoreSweeper(tmp_path, 4000).sweep().removed_bytes == 0


def test_one_worker_of_a_machine_sweeps_at_a_time_and_another_takes_over(tmp_path: Path):
    pages(tmp_path, 1, 2, 3)
    with (tmp_path / ".sweeper").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert StoreSweeper(tmp_path, 1000).sweep() is None
    assert StoreSweeper(tmp_path, 1000).sweep().num_pages == 0


def test_what_a_writer_left_unfinished_is_removed_when_it_is_old(tmp_path: Path):
    fresh, stale = tmp_path / ".a.tmp", tmp_path / ".b.tmp"
    for file, age_s in ((fresh, 5), (stale, 500)):
        file.write_bytes(b"x")
        os.utime(file, (1000.0 - age_s, 1000.0 - age_s))
    StoreSweeper(tmp_path, 1000, now_unix_s=lambda: 1000.0).sweep()
    assert (fresh.exists(), stale.exists()) == (True, False)
