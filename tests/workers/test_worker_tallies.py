"""What a worker adds up for its status: hand-offs by link, prompt tokens by where they were found."""

import pytest

from contracts.lifecycle import FinishReason, HandOff, Phase
from contracts.links import Link, link_between
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Attempt, Counts, Sampling, Stages, pack_ids
from workers.engine import End, Job
from workers.tallies import Tallies


def job(phase: Phase, link: str = "", hand_off: HandOff | None = HandOff.DIRECT) -> Job:
    return Job(
        attempt=Attempt("r", 1), phase=phase, gateway_id="g", deadline_unix_ms=0, prompt=pack_ids(range(100)),
        sampling=Sampling(max_tokens=1), hand_off=hand_off, link=link,
    )  # fmt: skip


def end(transfer_ms: float = 0.0, *, overlapped_ms: float = 0.0, **counts: int) -> End:
    stages = Stages(transfer_ms=transfer_ms)
    return End(reason=FinishReason.STOP, counts=Counts(**counts), stages=stages, overlapped_ms=overlapped_ms)


def status_of(tallies: Tallies) -> pb.Status:
    status = pb.Status()
    tallies.fill(status)
    return status


def test_prompt_tokens_are_counted_by_where_they_were_found():
    tallies = Tallies()
    counts = {"prompt_tokens": 100, "cached_tokens": 70, "cached_host_tokens": 20, "cached_store_tokens": 40}
    tallies.ended(job(Phase.PREFILL), end(**counts), FinishReason.STOP)
    tallies.ended(job(Phase.UNIFIED, hand_off=None), end(prompt_tokens=50, cached_tokens=5), FinishReason.STOP)
    # What a decode worker reads is the hand-off of a prompt that was counted by the prefill side.
    stored = {"prompt_tokens": 100, "cached_tokens": 96, "cached_store_tokens": 96}
    tallies.ended(job(Phase.DECODE, hand_off=HandOff.STORE), end(**stored), FinishReason.STOP)
    status = status_of(tallies)
    found = (status.hit_device_tokens, status.hit_host_tokens, status.hit_store_tokens, status.computed_tokens)
    assert found == (10 + 5, 20, 40, 30 + 45)


def test_hand_offs_are_counted_by_link():
    tallies = Tallies()
    for transfer_ms in (2.0, 4.0, 9.0):
        tallies.ended(job(Phase.PREFILL, Link.CROSS_NODE), end(transfer_ms), FinishReason.STOP)
    tallies.ended(job(Phase.DECODE, Link.CROSS_NODE), end(), FinishReason.HAND_OFF)
    tallies.ended(job(Phase.PREFILL, Link.NODE), end(1.0), FinishReason.STOP)
    status = status_of(tallies)
    assert [(one.link, one.done, one.failed) for one in status.links] == [("node", 1, 0), ("cross_node", 3, 1)]
    assert (status.transfers_done, status.transfers_failed) == (4, 1)
    assert (status.transfer_total_ms, status.transfer_exposed_p50_ms) == (16.0, 4.0)


def test_what_was_sent_while_the_prompt_was_computed_is_part_of_a_transfer_and_not_exposed():
    tallies = Tallies()
    tallies.ended(job(Phase.PREFILL), end(4.0, overlapped_ms=30.0), FinishReason.STOP)
    tallies.ended(job(Phase.PREFILL), end(6.0), FinishReason.STOP)
    status = status_of(tallies)
    assert (status.transfer_total_ms, status.transfer_exposed_ms) == (40.0, 10.0)


@pytest.mark.parametrize(
    ("giver", "taker", "link"),
    [
        (("a", "z"), ("a", "z"), Link.NODE),
        (("a", "z"), ("b", "z"), Link.CROSS_NODE),
        (("a", "z"), ("b", "y"), Link.CROSS_ZONE),
        (("a", ""), ("a", ""), Link.NODE),
        (("a", ""), ("b", ""), Link.CROSS_NODE),
    ],
)
def test_a_link_is_named_by_what_the_workers_share(giver: tuple[str, str], taker: tuple[str, str], link: Link):
    assert link_between(*giver, *taker) is link_between(*taker, *giver) is link
