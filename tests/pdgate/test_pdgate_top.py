"""`pdgate top` shows what schedulers leave in Redis."""

import asyncio
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from contracts.resp import redis_client
from contracts.series import Flip, Point, add_command
from pdgate.cli import app
from pdgate.top import picture, summary


def point(**fields) -> Point:
    return Point(
        **{
            "at_unix_ms": 1, "prefill": 1, "decode": 2, "unified": 0, "target": "2P1D0U", "why": "gain", "mode": "auto",
            "rung": "normal", "met": 9, "missed": 1, "structural": 0, "refused": 0, "by_stage": {"prefill_queue": 1},
            "num_waiting": 3, "oldest_wait_s": 0.4, "queued_prefill_tokens": 1200, "decode_use": 0.25, "num_running": 7,
            **fields,
        }
    )  # fmt: skip


def drawn(points) -> str:
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(picture({"tiny": points}))
    return captured.get()


def test_a_picture_says_who_is_to_blame_and_what_moved():
    flip = Flip(worker_id="d2", from_role="decode", to_role="prefill", why="gain", done=True)
    text = drawn([point(), point(flips=(flip,), refused=10, rung="shed_batch")])
    for said in ("90.0%", "60.0% with refused", "prefill_queue 2", "d2 decode→prefill (gain)", "shed_batch", "2P1D0U"):
        assert said in text


def test_a_pool_that_nobody_led_says_so():
    assert "no scheduler" in drawn([])
    assert summary("tiny", []).now is None


def test_no_requests_are_no_attainment():
    idle = point(met=0, missed=0, by_stage={})
    assert summary("tiny", [idle]).attainment is None
    assert "no requests" in drawn([idle])


@pytest.mark.parametrize("arguments", [["--json"], ["--once"]])
def test_the_command_reads_the_stacks_redis(valkey_url, tmp_path, monkeypatch, arguments):
    async def write() -> None:
        async with redis_client(valkey_url) as redis:
            await redis.flushdb()
            await redis.execute_command(*add_command("tiny", point()))

    asyncio.run(write())
    monkeypatch.setenv("REDIS_URL", valkey_url)
    done = CliRunner().invoke(app, ["top", "--pool", "tiny", *arguments])
    assert done.exit_code == 0, done.output
    if arguments == ["--json"]:
        (got,) = json.loads(done.output)
        assert (got["pool"], got["attainment"], got["now"]["num_waiting"]) == ("tiny", 0.9, 3)
    else:
        assert "90.0%" in done.output
