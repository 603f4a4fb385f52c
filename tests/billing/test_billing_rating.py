"""What a request costs, and which price it is."""

import uuid

import pytest
from billing_rig import TINY, now_ms, usage_event
from hypothesis import given
from hypothesis import strategies as st

from billing.events import Poison, decode_event, rate_event
from billing.moments import moment, unix_ms
from billing.prices import PriceBook, PriceVersion
from contracts.identity import new_rid
from contracts.rating import CacheScope, Meter, Price, Tokens
from contracts.usage import Outcome
from contracts.wire import encode

DAY_MS = 86_400_000


def book(*versions):
    return PriceBook(versions, now_ms())


def version(number, *, from_ms=0, to_ms=None, organisation=None, nano=1_000_000):
    price = Price(version=number, model="tiny", prefill_computed=nano, prefill_cached=nano, decode=nano)
    return PriceVersion(price=price, organisation=organisation, from_ms=from_ms, to_ms=to_ms, source="admin", set_by="")


def rated(event, prices):
    return rate_event(decode_event(encode(event)), prices)


LIST = PriceVersion(price=TINY, organisation=None, from_ms=0, to_ms=None, source="catalogue", set_by="")


def test_each_record_is_rounded_up_alone():
    # 1 token at 0.1 per million costs 100 nano; at 1 nano per million it costs a millionth of one: rounded up to 1.
    dust = Price(version=1, model="tiny", prefill_computed=1, prefill_cached=1, decode=1)
    prices = book(PriceVersion(price=dust, organisation=None, from_ms=0, to_ms=None, source="admin", set_by=""))
    one = rated(usage_event(tokens=Tokens(prefill_computed=1, prefill_cached=0, decode=999_999)), prices)
    assert [record.cost for record in one.records] == [1, 0, 1]
    assert one.cost == 2, "not ceil of the sum, 1"


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 10**9))
def test_a_record_costs_at_most_one_nano_unit_more_than_the_exact_sum(computed, cached, decode, nano):
    event = usage_event(tokens=Tokens(prefill_computed=computed, prefill_cached=cached, decode=decode), cost=0)
    one = rated(event, book(version(1, nano=nano)))
    for record in one.records:
        assert 0 <= record.cost * 1_000_000 - record.tokens * nano < 1_000_000
    assert one.cost == sum(record.cost for record in one.records)


@pytest.mark.parametrize("outcome", [Outcome.INTERRUPTED, Outcome.REFUSED, Outcome.LOST])
def test_what_we_broke_keeps_its_counts_and_costs_nothing(outcome):
    one = rated(usage_event(outcome=outcome), book(LIST))
    assert [(record.meter, record.tokens, record.cost) for record in one.records] == [
        (Meter.PREFILL_COMPUTED, 100, 0),
        (Meter.PREFILL_CACHED, 30, 0),
        (Meter.DECODE, 50, 0),
    ]
    assert (one.billable, one.cost) == (False, 0)


def test_a_client_that_left_pays_for_what_was_done():
    one = rated(usage_event(outcome=Outcome.CLIENT_LEFT, tokens=Tokens(prefill_computed=100, decode=5)), book(LIST))
    assert one.cost == 100 * 100 + 5 * 400  # nano per token


def test_the_price_changes_exactly_at_its_moment_and_what_was_told_is_honoured_for_ten_minutes():
    change = 1_790_000_000_000
    first, second = version(1, nano=1_000_000), version(2, from_ms=change, nano=2_000_000)

    def cost_of(at_ms, told):
        event = usage_event(rid=new_rid(at_ms), tokens=Tokens(prefill_computed=7), price=told.price, cost=0)
        return rated(event, book(first, second)).cost

    assert cost_of(change - 1, first) == 7
    assert cost_of(change, second) == 14
    assert cost_of(change - 1, second) == 7, "not in force yet: the book decides"
    assert cost_of(change + 3_000, first) == 7, "a gateway's copy may be seconds old, and that is what it answered"
    assert cost_of(change + 600_001, first) == 14, "no gateway may serve from so old a copy"
    assert cost_of(change + 1, version(9)) == 14, "no such version"


def test_a_batch_request_pays_the_discounted_price_and_a_shared_hit_its_own():
    terms = Price(
        version=1, model="tiny", prefill_computed=1_000_001, prefill_cached=200_000, decode=4_000_000,
        prefill_shared=300_000, batch_ppm=500_000, minimum=50,
    )  # fmt: skip
    prices = book(PriceVersion(price=terms, organisation=None, from_ms=0, to_ms=None, source="admin", set_by=""))
    tokens = Tokens(prefill_computed=100, prefill_cached=10, decode=20)

    def costs(**changes):
        one = rated(usage_event(tokens=tokens, price=terms, **changes), prices)
        return [record.cost for record in one.records], one.top_up, one.cost

    # 100 x 1.000001 -> 101; 10 x 0.2 = 2; 20 x 4 = 80 nano-units
    assert costs() == ([101, 2, 80], 0, 183)
    # half of each, the price rounded up first: 100 x 0.500001 -> 51; 1; 40
    assert costs(batch=True, cost=92) == ([51, 1, 40], 0, 92)
    assert costs(cache_scope=CacheScope.SHARED, cost=184) == ([101, 3, 80], 0, 184)


def test_a_request_cheaper_than_the_minimum_pays_the_minimum_and_one_without_tokens_nothing():
    terms = Price(version=1, model="tiny", prefill_computed=10**6, prefill_cached=10**6, decode=10**6, minimum=50)
    prices = book(PriceVersion(price=terms, organisation=None, from_ms=0, to_ms=None, source="admin", set_by=""))

    def rate_it(outcome=Outcome.FINISHED, **tokens):
        one = rated(usage_event(tokens=Tokens(**tokens), price=terms, outcome=outcome), prices)
        assert one.cost == one.event.cost, "the gateway's sum and billing's"
        return one.top_up, one.cost

    assert rate_it(prefill_computed=20, decode=10) == (20, 50)
    assert rate_it(prefill_computed=20, decode=40) == (0, 60)
    assert rate_it() == (0, 0)
    assert rate_it(outcome=Outcome.INTERRUPTED, decode=1) == (0, 0)


def test_a_price_with_an_end_gives_way_to_the_older_one():
    prices = book(version(1), version(2, from_ms=100, to_ms=200))
    assert [prices.in_force("tiny", at).version for at in (99, 100, 199, 200)] == [1, 2, 2, 1]


def test_an_organisations_own_price_goes_before_a_newer_list_price():
    prices = book(version(1), version(2, organisation="org_acme", from_ms=50), version(3, from_ms=100))
    assert prices.in_force("tiny", 150, "org_acme").version == 2
    assert prices.in_force("tiny", 150, "org_other").version == 3
    assert prices.in_force("tiny", 10, "org_acme").version == 1
    assert prices.in_force("tiny", 150).version == 3


def test_a_request_before_the_first_price_is_not_priced():
    with pytest.raises(Poison, match="no_price"):
        rated(usage_event(rid=new_rid(99), cost=0), book(version(1, from_ms=100)))


def test_a_cost_that_is_not_exact_everywhere_is_refused():
    with pytest.raises(Poison, match="cost_too_large"):
        rated(usage_event(tokens=Tokens(decode=10**12), cost=0), book(version(1, nano=10**12)))


@pytest.mark.parametrize(
    "rid",
    [
        "",
        "r1",
        str(uuid.uuid4()),
        new_rid(1).upper().replace("0", "A"),
        new_rid(1).replace("-", ""),
        new_rid(2**48 - 1),
    ],
    ids=[
        "empty",
        "no uuid",
        "version 4",
        "upper case",
        "without dashes",
        "a time out of range",
    ],  # the same in each process
)
def test_a_request_id_that_is_not_a_canonical_uuid_of_version_7_is_poison(rid):
    with pytest.raises(Poison, match="bad_request_id"):
        decode_event(encode(usage_event(rid=rid or "-")))


@given(st.integers(0, 4_000_000_000_000))
def test_the_time_in_a_request_id_survives_the_way_to_postgres_and_back(at):
    decoded = decode_event(encode(usage_event(rid=new_rid(at))))
    assert decoded.at_ms == at
    assert unix_ms(moment(at)) == at
