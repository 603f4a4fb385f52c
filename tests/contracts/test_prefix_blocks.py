"""The names of prompt blocks: an independent computation, scopes that do not meet, and packing."""

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from contracts.prefix import BLOCK_TOKENS, next_block, pack_blocks, prompt_blocks, scope, unpack_blocks
from contracts.wire import pack_ids


def test_names_are_those_of_a_computation_by_hand():
    tokens = list(range(2 * BLOCK_TOKENS + 5))
    seed = hashlib.blake2b(b"pdgate-prefix-1", digest_size=8)
    for part in (b"rev", b"", b"salt"):
        seed.update(struct.pack("<I", len(part)) + part)
    first = hashlib.blake2b(seed.digest() + struct.pack("<64I", *range(64)), digest_size=8).digest()
    second = hashlib.blake2b(first + struct.pack("<64I", *range(64, 128)), digest_size=8).digest()
    expected = [int.from_bytes(first, "little"), int.from_bytes(second, "little")]
    assert prompt_blocks(pack_ids(tokens), scope(model_revision="rev", salt="salt")) == expected


def test_scopes_that_differ_in_one_part_share_no_name():
    prompt = pack_ids(range(BLOCK_TOKENS))
    scopes = [
        scope(model_revision="a", adapter="b", salt="c"),
        scope(model_revision="ab", adapter="", salt="c"),
        scope(model_revision="a", adapter="bc", salt=""),
        scope(model_revision="a", adapter="b", salt="d"),
        scope(model_revision="a"),
    ]
    assert len({prompt_blocks(prompt, start)[0] for start in scopes}) == len(scopes)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.integers(0, 299), st.integers(0, 2**64 - 1))
def test_a_longer_prompt_begins_with_the_names_of_a_shorter_one(ids, cut, start):
    whole = prompt_blocks(pack_ids(ids), start)
    part = prompt_blocks(pack_ids(ids[:cut]), start)
    assert part == whole[: len(part)]
    assert len(whole) == len(ids) // BLOCK_TOKENS


def test_a_change_in_one_block_changes_it_and_all_that_follow():
    ids = list(range(4 * BLOCK_TOKENS))
    before = prompt_blocks(pack_ids(ids), 7)
    ids[BLOCK_TOKENS] += 1
    after = prompt_blocks(pack_ids(ids), 7)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


def test_names_survive_packing():
    names = [0, 1, 2**64 - 1, next_block(5, pack_ids(range(BLOCK_TOKENS)))]
    assert unpack_blocks(pack_blocks(names)) == names
