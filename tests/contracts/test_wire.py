import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import wire
from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, HandOff, Path, Phase, Role, WorkerState
from contracts.parsing import (
    Detail,
    Grammar,
    Parsing,
    TokenLogprob,
    ToolCallDelta,
    detail_from_pb,
    detail_to_pb,
    parsing_from_pb,
    parsing_to_pb,
)
from contracts.rating import Price
from contracts.slo import SloTarget

OWNER = wire.Owner(
    org="org_a",
    project="proj_a",
    key_id="key_a",
    model="tiny",
    tier="default",
    price=Price(version=3, model="tiny", prefill_computed=1, prefill_cached=2, decode=3),
    slo=SloTarget(ttft_ms=2000, tpot_ms=None),
)
REF = wire.WorkerRef(worker_id="w", epoch=7, address="127.0.0.1:1")


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_survive_packing(ids):
    assert wire.unpack_ids(wire.pack_ids(ids)) == ids


def test_token_ids_are_little_endian_u32():
    assert wire.pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_a_torn_list_of_ids_is_refused():
    with pytest.raises(ValueError, match="bytes"):
        wire.unpack_ids(b"\x01\x00\x00")


@pytest.mark.parametrize(
    "entry",
    [
        wire.Submit(
            rid=new_rid(1),
            pool="tiny",
            gateway_id="g",
            owner=OWNER,
            prompt=wire.pack_ids([1, 2]),
            sampling=wire.Sampling(max_tokens=5, temperature=0.0, stop=("a",)),
            deadline_unix_ms=2,
        ),
        wire.Continue(rid=new_rid(1), lost_attempt=1, delivered=(wire.pack_ids([3]),)),
        wire.Abort(rid=new_rid(1), reason="client_left"),
    ],
)
def test_inbox_entries_survive_the_wire(entry):
    assert wire.decode_inbox(wire.encode(entry)) == entry


@pytest.mark.parametrize(
    "notice",
    [
        wire.Placed(rid="r", attempt=2, path=Path.PD, hand_off=HandOff.DIRECT, decode=REF, prefill=REF),
        wire.Refused(rid="r", code="no_capacity", message="m", retry_after_s=1.5),
        wire.AttemptLost(rid="r", attempt=1, cause="worker_dead", retrying=True),
    ],
)
def test_notices_survive_the_wire(notice):
    assert wire.decode_notice(wire.encode(notice)) == notice


def test_a_newer_senders_unknown_field_is_ignored():
    raw = msgspec.msgpack.encode({"type": "abort", "v": 2, "rid": "r", "reason": "x", "colour": "green"})
    assert wire.decode_inbox(raw) == wire.Abort(v=2, rid="r", reason="x")


def test_an_entry_of_an_unknown_kind_is_an_error():
    with pytest.raises(msgspec.ValidationError):
        wire.decode_inbox(msgspec.msgpack.encode({"type": "dance", "rid": "r"}))


def test_zero_is_a_value_and_none_is_absence_in_sampling():
    zero = wire.Sampling(max_tokens=1, temperature=0.0, seed=0, min_tokens=0)
    assert wire.sampling_from_pb(wire.sampling_to_pb(zero)) == zero
    absent = wire.Sampling(max_tokens=1)
    assert wire.sampling_from_pb(wire.sampling_to_pb(absent)) == absent


def test_attempts_counts_and_stages_survive_protobuf():
    attempt = wire.Attempt(new_rid(5), 2, 3)
    assert wire.attempt_from_pb(wire.attempt_to_pb(attempt)) == attempt
    counts = wire.Counts(prompt_tokens=1, cached_tokens=2, completion_tokens=3, reasoning_tokens=4)
    assert wire.counts_from_pb(wire.counts_to_pb(counts)) == counts
    stages = wire.Stages(queue_ms=0.5, compute_ms=1.0, transfer_ms=1.5, first_token_ms=2.0)
    assert wire.stages_from_pb(wire.stages_to_pb(stages)) == stages


def test_every_enum_member_has_a_protobuf_value_of_its_own():
    for table, members in (
        (wire.PHASE_TO_PB, Phase),
        (wire.ROLE_TO_PB, Role),
        (wire.STATE_TO_PB, WorkerState),
        (wire.FINISH_TO_PB, FinishReason),
    ):
        assert set(table) == set(members)
        assert len(set(table.values())) == len(table)
        assert 0 not in table.values()


GRAMMAR = Grammar("json_schema", '{"type":"object"}')
PARSING = Parsing(tool_parser="hermes", tools='[{"type":"function"}]', tool_name="f", parallel_tool_calls=False)


def test_sampling_with_every_feature_survives_protobuf():
    sampling = wire.Sampling(
        max_tokens=5, logit_bias={0: -100.0, 7: 1.5}, top_logprobs=0, stop_token_ids=(2,), grammar=GRAMMAR
    )
    assert wire.sampling_from_pb(wire.sampling_to_pb(sampling)) == sampling
    assert wire.sampling_from_pb(wire.sampling_to_pb(wire.Sampling(max_tokens=5))).top_logprobs is None


def test_an_unknown_kind_of_grammar_is_refused():
    message = wire.sampling_to_pb(wire.Sampling(max_tokens=5, grammar=GRAMMAR))
    message.grammar.kind = "haiku"
    with pytest.raises(msgspec.ValidationError):
        wire.sampling_from_pb(message)


@pytest.mark.parametrize("parsing", [PARSING, Parsing(reasoning_parser="qwen3", reasoning_open=True)])
def test_parsing_survives_protobuf_and_msgpack(parsing):
    assert parsing_from_pb(parsing_to_pb(parsing)) == parsing
    assert msgspec.msgpack.decode(wire.encode(parsing), type=Parsing) == parsing


def test_details_survive_protobuf():
    top = (TokenLogprob(id=5, logprob=-0.5, token=b"\xc3"), TokenLogprob(id=6, logprob=-1.0, token=b"b"))
    detail = Detail(
        reasoning="hm",
        tool_calls=(ToolCallDelta(index=0, id="call_1", name="f"), ToolCallDelta(index=0, arguments='{"a"')),
        logprobs=(TokenLogprob(id=5, logprob=-0.5, token=b"\xc3", top=top),),
    )
    message = detail_to_pb(3, detail)
    assert message.entry == 3
    assert detail_from_pb(message) == detail
