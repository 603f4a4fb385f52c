"""What a client may say about a request for its own books, and how much of it is kept."""

import msgspec

from contracts.dimensions import NO_DIMENSIONS, Dimensions, dimensions
from contracts.rating import Price, Tokens
from contracts.settlement import decode_owner, encode_owner, usage_event_of
from contracts.slo import SloTarget
from contracts.units import NanoPerMillion
from contracts.usage import EMPTY_ANSWER, Outcome
from contracts.wire import Owner

RID = "01a229bd-76e1-7cb4-8f6f-64bf51d2c09d"
PRICE = Price(
    version=1,
    model="tiny",
    prefill_computed=NanoPerMillion(1_000_000),
    prefill_cached=NanoPerMillion(500_000),
    decode=NanoPerMillion(2_000_000),
)


def owner(said: Dimensions) -> Owner:
    return Owner(
        org="org_1",
        project="proj_1",
        key_id="key_1",
        model="tiny",
        tier="default",
        price=PRICE,
        slo=SloTarget(),
        dimensions=said,
    )


def test_dimensions_are_cut_to_their_length_and_to_eight_tags():
    said = dimensions(
        user="u" * 1000,
        safety_identifier="s",
        reference="r\n\x00\ud800",
        metadata={f"tag{i}": "v" * 500 for i in range(16)},
    )
    assert (len(said.user), said.safety_identifier, said.reference) == (128, "s", "r")
    assert list(said.tags) == [f"tag{i}" for i in range(8)]
    assert set(map(len, said.tags.values())) == {128}


def test_a_request_that_says_nothing_costs_a_reservation_no_bytes():
    assert dimensions(user="", metadata={}) is NO_DIMENSIONS
    assert '"dimensions":{}' in encode_owner(owner(NO_DIMENSIONS))


def test_dimensions_go_with_the_owner_into_the_usage_event_whoever_settles():
    said = dimensions(user="ada", metadata={"team": "red"})
    known = decode_owner(encode_owner(owner(said)))
    event = usage_event_of(known, rid=RID, pool="tiny", outcome=Outcome.LOST, settled_by="billing")
    assert event.dimensions == said
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=type(event)) == event


def test_only_a_billable_request_costs_something():
    tokens = Tokens(prefill_computed=10, prefill_cached=4, decode=3)  # 10 + 2 + 6 nano-units
    costs = {
        outcome: usage_event_of(owner(NO_DIMENSIONS), rid=RID, pool="tiny", outcome=outcome, tokens=tokens).cost
        for outcome in Outcome
    }
    assert costs == {
        Outcome.FINISHED: 18,
        Outcome.CLIENT_LEFT: 18,
        Outcome.INTERRUPTED: 0,
        Outcome.REFUSED: 0,
        Outcome.LOST: 0,
    }
    empty = usage_event_of(
        owner(NO_DIMENSIONS), rid=RID, pool="tiny", outcome=Outcome.FINISHED, tokens=tokens, cause=EMPTY_ANSWER
    )
    assert (empty.cost, empty.billable) == (0, False)
