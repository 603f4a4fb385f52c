import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import keys
from contracts.identity import at_ms, engine_id, new_rid, new_room, rid_bytes, rid_from_bytes, shard_of

UNIX_MS = st.integers(0, 2**48 - 1)


@given(UNIX_MS)
def test_a_request_id_is_a_uuid7_that_holds_its_arrival(unix_ms):
    rid = new_rid(unix_ms)
    assert uuid.UUID(rid).version == 7
    assert uuid.UUID(rid).variant == uuid.RFC_4122
    assert at_ms(rid) == unix_ms


@given(UNIX_MS)
def test_a_request_id_survives_its_16_bytes(unix_ms):
    rid = new_rid(unix_ms)
    assert len(rid_bytes(rid)) == 16
    assert rid_from_bytes(rid_bytes(rid)) == rid


def test_later_requests_have_greater_ids():
    assert new_rid(1_000) < new_rid(1_001)


def test_another_uuid_version_has_no_arrival_time():
    with pytest.raises(ValueError, match="no UUIDv7"):
        at_ms(str(uuid.uuid4()))


def test_no_engine_id_is_a_prefix_of_another():
    # SGLang aborts by prefix, so ids of one length are what keeps an abort to its own request.
    rid = new_rid(0)
    ids = {engine_id(rid, attempt, sample) for attempt in (1, 10, 99) for sample in (0, 1, 10, 999)}
    assert {len(i) for i in ids} == {43}
    assert len(ids) == 12


@pytest.mark.parametrize(("attempt", "sample"), [(0, 0), (100, 0), (1, -1), (1, 1000)])
def test_an_engine_id_that_would_not_fit_is_refused(attempt, sample):
    with pytest.raises(ValueError, match="outside"):
        engine_id(new_rid(0), attempt, sample)


def test_rooms_fit_63_bits():
    assert all(0 <= new_room() < 2**63 for _ in range(1000))


def test_the_shard_is_redis_clusters_crc16():
    # The check value of CRC-16/XMODEM, as in the Redis Cluster specification: "123456789" -> 0x31C3.
    assert shard_of("123456789") == 0x31C3 % 64


def test_all_keys_of_an_organisation_carry_its_tag():
    tag = keys.shard_tag("org_a")
    for key in (
        keys.reservation("org_a", "r"),
        keys.open_reservations("org_a"),
        keys.usage_stream(shard_of("org_a")),
        keys.dead_letters(shard_of("org_a")),
        keys.settled_request("org_a", "r"),
        keys.key_states("org_a"),
        keys.rate_bucket("org_a", "key", "k", "requests"),
        keys.concurrency_leases("org_a", "key", "k"),
        keys.budget("org_a", "org", "org_a"),
    ):
        assert tag in key
