"""The prefix index against a plain model of it."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler.policy.prefix import PrefixIndex

WORKERS = st.sampled_from(["a", "b", "c"])
CHAINS = st.integers(1, 4).flatmap(lambda root: st.integers(0, 6).map(lambda n: [root * 100 + i for i in range(n)]))


class IndexMachine(RuleBasedStateMachine):
    """Stores, drops and clears, next to a dictionary of sets."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.model = {}

    @rule(worker=WORKERS, blocks=CHAINS)
    def store(self, worker, blocks):
        self.index.stored(worker, blocks)
        self.model.setdefault(worker, set()).update(blocks)

    @rule(worker=WORKERS, blocks=CHAINS)
    def remove(self, worker, blocks):
        self.index.removed(worker, blocks)
        self.model.get(worker, set()).difference_update(blocks)

    @rule(worker=WORKERS)
    def clear(self, worker):
        self.index.cleared(worker)
        self.model.pop(worker, None)

    @rule(blocks=CHAINS)
    def match(self, blocks):
        expected = {}
        for worker, held in self.model.items():
            count = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
            if count:
                expected[worker] = count
        assert self.index.match(blocks) == expected

    @invariant()
    def nothing_is_kept_for_nobody(self):
        live = set().union(*self.model.values()) if self.model else set()
        assert len(self.index) >= len(live)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_worker_that_left_is_never_matched_again_even_if_many_leave():
    index = PrefixIndex()
    index.stored("stays", [1, 2])
    for number in range(300):
        index.stored(f"worker-{number}", [1, 2, 3])
        assert index.match([1, 2, 3]) == {"stays": 2, f"worker-{number}": 3}
        index.cleared(f"worker-{number}")
        assert index.match([1, 2, 3]) == {"stays": 2}
    assert max(index._masks.values()).bit_length() <= 80


@given(st.lists(st.integers(0, 500), max_size=300))
def test_the_index_keeps_its_bound_and_forgets_the_oldest(blocks):
    index = PrefixIndex(max_blocks=50)
    for block in blocks:
        index.stored("a", [block])
    newest = list(dict.fromkeys(reversed(blocks)))[:50]
    assert len(index) == len(newest)
    assert all(index.match([block]) == {"a": 1} for block in newest)
