"""Mutated bytes at every entry: taken or refused as documented, nothing else. `make fuzz` goes on by coverage."""

import random

import pytest

from benches.fuzz.targets import TARGETS

ROUNDS = 5000
PIECES = (
    b"null", b"true", b"-1", b"1e400", b"NaN", b'"\\ud800"', b"\xff\xfe", b"[" * 300, b'{"a":' * 200, b"9" * 400,
    b"\x00", b"", b'"\\u0000"', b"18446744073709551616", b'"' + b"x" * 600 + b'"', b"{}", b"[]", b"0.1",
)  # fmt: skip


def mutated(seed: bytes, draw: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randint(0, len(data)), draw.choice((0, 1, 1, 2, 4, 8, 30))
        match draw.randrange(4):
            case 0:
                data[at : at + length] = draw.choice(PIECES)
            case 1:
                data[at : at + length] = draw.randbytes(length)
            case 2:
                data[at:at] = data[draw.randint(0, len(data)) :][: draw.randint(1, 40)]
            case _:
                del data[at : at + length]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_are_taken_or_refused(name: str) -> None:
    target, draw = TARGETS[name], random.Random(7)
    assert all(target(seed) for seed in target.seeds if name != "bodies"), "a seed is a good example"
    for _ in range(ROUNDS):
        data = mutated(draw.choice(target.seeds), draw)
        try:
            target(data)
        except Exception as error:
            error.add_note(f"of {data!r}")
            raise
