"""How unevenly tokens hit the experts of a mixture, and how differently two phases do."""

import pytest

from contracts.experts import distance, imbalance


def test_an_even_layer_is_one_and_a_layer_with_one_busy_expert_is_their_number():
    assert imbalance([5, 5, 5, 5], 4) == 1.0
    assert imbalance([0, 0, 20, 0], 4) == 4.0
    assert imbalance([10, 6, 2, 2], 4) == 2.0  # 10 of 20, where 5 would be even
    assert imbalance([5, 5, 5, 5, 0, 0, 20, 0], 4) == 2.5  # the mean of two layers


def test_layers_without_hits_say_nothing():
    assert imbalance([0, 0, 3, 1], 2) == 1.5
    assert imbalance([0, 0, 0, 0], 2) == 0.0
    assert distance([0, 0, 3, 1], [7, 0, 1, 3], 2) == 0.5
    assert distance([0, 0], [1, 1], 2) == 0.0


def test_the_distance_is_of_shares_and_not_of_counts():
    assert distance([1, 3], [10, 30], 2) == 0.0
    assert distance([4, 0], [0, 9], 2) == 1.0
    assert distance([3, 1, 0, 0], [1, 1, 1, 1], 4) == 0.5  # half of the tokens would have to go elsewhere


def test_hits_that_are_no_whole_layers_are_refused():
    with pytest.raises(ValueError, match="whole layers"):
        imbalance([1, 2, 3], 2)
