"""What a worker tells of its cache: blocks from pages, changes in order, and everything again on demand."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from contracts.prefix import BLOCK_TOKENS, prompt_blocks, scope, unpack_blocks
from contracts.v1 import worker_pb2 as pb
from contracts.wire import pack_ids
from workers.engines.page_blocks import PageBlocks
from workers.kv_table import MESSAGE_BLOCKS, KvTable

SCOPE = scope(model_revision="r", salt="s")
TOKENS = list(range(1000, 1000 + 4 * BLOCK_TOKENS + 20))


@given(st.sampled_from([1, 2, 4, 16, 32, 64]), st.lists(st.integers(0, 20), max_size=8))
def test_pages_of_any_size_in_any_pieces_complete_the_blocks_of_the_prompt(page_size, pieces):
    pages, names, parent, at = PageBlocks(), itertools.count(500), None, 0
    found: list[int] = []
    whole = len(TOKENS) // page_size
    for piece in [*pieces, whole]:
        length = min(piece, whole - at)
        ids = [next(names) for _ in range(length)]
        tokens = TOKENS[at * page_size : (at + length) * page_size]
        found += pages.stored(ids, parent, tokens, page_size, SCOPE, 1)
        parent = ids[-1] if ids else parent
        at += length
    assert found == prompt_blocks(pack_ids(TOKENS), SCOPE)


def test_a_block_is_gone_with_the_page_that_completes_it_and_only_in_that_tier():
    pages = PageBlocks()
    ids = list(range(16))
    blocks = pages.stored(ids, None, TOKENS[:256], 16, SCOPE, 1)
    assert pages.stored(ids, None, TOKENS[:256], 16, SCOPE, 2) == blocks
    assert pages.removed([12, 13, 14], 1) == []
    assert pages.removed([15], 1) == blocks[3:]
    assert len(pages) == 16  # all are in the other tier still
    assert pages.removed(ids, 2) == blocks
    assert pages.removed(range(12), 1) == blocks[:3]
    assert len(pages) == 0


def test_pages_behind_an_unknown_one_have_no_name():
    pages = PageBlocks()
    assert pages.stored([9], 8, TOKENS[:64], 64, SCOPE, 1) == []
    assert pages.num_orphans == 1


def told(table: KvTable) -> list[pb.KvEvents]:
    return list(table.take())


def test_changes_are_told_once_in_order_and_what_undoes_itself_is_not():
    table = KvTable("r")
    assert [(e.seq, e.cleared) for e in told(table)] == [(1, True)]
    table.stored("device", [1, 2, 3])
    table.removed("device", [2])
    table.stored("host", [2])
    first, second = told(table)
    assert (first.seq, first.tier, unpack_blocks(first.stored)) == (2, pb.TIER_DEVICE, [1, 3])
    assert (second.seq, second.tier, unpack_blocks(second.stored)) == (3, pb.TIER_HOST, [2])
    table.removed("device", [1])
    table.stored("device", [1])
    table.removed("device", [3, 99])
    (last,) = told(table)
    assert (unpack_blocks(last.stored), unpack_blocks(last.removed)) == ([], [3])
    assert told(table) == []


def test_everything_is_told_again_in_pieces_that_begin_with_cleared():
    table = KvTable("r")
    names = set(range(MESSAGE_BLOCKS + 5))
    table.stored("device", names)
    told(table)
    table.say_again()
    table.stored("device", [10**6])
    events = told(table)
    assert [e.cleared for e in events] == [True, False, False]
    assert [e.seq - events[0].seq for e in events] == [0, 1, 2]
    assert {n for e in events for n in unpack_blocks(e.stored)} == names | {10**6}
    table.clear()
    assert [(e.cleared, e.stored) for e in told(table)] == [(True, b"")]
    assert len(table) == 0
