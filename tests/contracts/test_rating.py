from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.rating import Meter, Price, Tokens, cost, rate

TOKENS = st.integers(0, 10**9)
PRICES = st.integers(0, 10**12)


def price(computed=100_000_000, cached=20_000_000, decode=400_000_000):
    return Price(version=1, model="m", prefill_computed=computed, prefill_cached=cached, decode=decode)


def test_a_thousand_tokens_at_ten_cents_a_million_cost_a_hundred_thousand_nano_units():
    assert rate(1000, 100_000_000) == 100_000


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (999_999, 1), (1_000_000, 1), (1_000_001, 2)])
def test_a_record_is_rounded_up_once(tokens, expected):
    assert rate(tokens, 1) == expected


@given(TOKENS, PRICES)
def test_the_rounding_error_of_a_record_is_under_one_nano_unit(tokens, nano_per_million):
    error = rate(tokens, nano_per_million) - Fraction(tokens * nano_per_million, 1_000_000)
    assert 0 <= error < 1


@given(TOKENS, TOKENS, TOKENS)
def test_a_request_costs_the_sum_of_its_three_records(computed, cached, decode):
    tokens = Tokens(prefill_computed=computed, prefill_cached=cached, decode=decode)
    assert cost(tokens, price()) == sum(rate(tokens.of(meter), price().of(meter)) for meter in Meter)


@given(TOKENS, st.integers(0, 10**6))
def test_a_cached_token_is_priced_once_and_only_as_cached(prompt, cached):
    cached = min(cached, prompt)
    split = Tokens(prefill_computed=prompt - cached, prefill_cached=cached)
    assert split.prompt == prompt
    assert cost(split, price(cached=0)) == rate(prompt - cached, price().prefill_computed)


@pytest.mark.parametrize(("tokens", "nano"), [(-1, 1), (1, -1)])
def test_a_negative_count_or_price_is_refused(tokens, nano):
    with pytest.raises(ValueError, match="cannot rate"):
        rate(tokens, nano)
