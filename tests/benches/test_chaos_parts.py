"""The instruments of `make chaos` and `make soak`: what they call wrong, held up and flat."""

import asyncio
import itertools
from pathlib import Path

import pytest

from benches.chaos.__main__ import sequence
from benches.chaos.actions import ACTIONS
from benches.chaos.callers import Call, Stalls
from benches.chaos.plan import PLAN, SHORT
from benches.chaos.relay import Relay
from benches.soak import fitted


def ended(text: str, *, verdict: str = "done", tokens: int = 2) -> Call:
    call = Call("?", 2, "one two")
    call.text, call.verdict, call.usage = text, verdict, {"completion_tokens": tokens}
    return call


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (ended("one two"), False),
        (ended("one tw"), True),  # a finished answer that lacks a byte
        (ended("one twoo"), True),
        (ended("one two", tokens=1), True),  # told of fewer tokens than it read
        (ended("one", verdict="cut"), False),  # broken off, and right so far
        (ended("on two", verdict="cut"), True),
        (ended("", verdict="refused"), False),
    ],
)
def test_an_answer_is_wrong_by_a_single_byte(call: Call, wrong: bool):
    assert call.wrong is wrong


def test_a_pause_is_held_up_unless_this_client_stood_still_itself():
    call = ended("one two")
    call.began_s, call.read_s, call.ended_s = 100.0, [100.1, 102.0, 102.1], 102.1
    stalls = Stalls()
    assert call.disturbed_until_s(100.05, stalls) == 102.0
    assert call.disturbed_until_s(102.05, stalls) is None
    stalls._found.append((100.2, 101.9))
    assert call.disturbed_until_s(100.05, stalls) is None


def test_every_fault_of_the_plan_can_be_done_and_has_a_name_of_its_own():
    assert {fault.do for fault in PLAN} <= ACTIONS.keys()
    names = [fault.name + str(fault.hold_s) for fault in PLAN]
    assert len(set(names)) == len(names)
    assert set(SHORT) <= {fault.name for fault in PLAN}


def test_every_fault_comes_before_any_comes_again_and_a_seed_repeats_the_order():
    once = list(sequence(PLAN, 2 * len(PLAN), 7))
    assert {f.name for f in once[: len(PLAN)]} == {f.name for f in PLAN}
    assert once == list(sequence(PLAN, 2 * len(PLAN), 7))
    assert once != list(sequence(PLAN, 2 * len(PLAN), 8))


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([100.0] * 50, True),
        ([100.0 + n for n in range(50)], False),  # 49 % more
        ([100.0 - n for n in range(50)], True),
        ([100.0 + 0.05 * n for n in range(50)], True),  # 2.5 MB: below the floor
        (list(itertools.chain.from_iterable((100.0, 130.0) for _ in range(25))), True),  # noise without a slope
    ],
)
def test_flat_is_what_grows_by_less_than_its_allowance(values: list[float], flat: bool):
    slope = fitted("gateway rss_mb", [(float(t), value) for t, value in enumerate(values)])
    assert slope.flat is flat


async def test_a_relay_passes_bytes_and_a_cut_lets_none_through(tmp_path: Path):
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            writer.write(piece)

    path = str(tmp_path / "s")
    server = await asyncio.start_unix_server(echo, path)
    relay = Relay(path)
    port = await relay.listen("127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    relay.cut()
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reader.readexactly(3)
    relay.heal()  # what was connected has lost its connection, as TCP would find out
    assert await reader.read() in (b"", b"two")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"three")
    assert await reader.readexactly(5) == b"three"
    writer.close()
    relay.close()
    server.close()
