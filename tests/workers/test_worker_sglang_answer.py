"""What a worker makes of SGLang's dictionaries; the dictionaries are as SGLang 0.5.23 sends them."""

import msgspec
import pytest

from contracts.lifecycle import FinishReason, HandOff, Phase
from contracts.wire import Counts, Sampling, pack_ids
from tests.workers.peers import new_attempt
from workers.engine import Job
from workers.engines.sglang_answer import Answer, sampling_params


def job(phase: Phase) -> Job:
    return Job(
        attempt=new_attempt(), phase=phase, gateway_id="gw", deadline_unix_ms=0, prompt=pack_ids(range(10)),
        sampling=Sampling(max_tokens=5), hand_off=None if phase is Phase.UNIFIED else HandOff.DIRECT,
    )  # fmt: skip


def out(ids=(), text="", finish=None, **meta):
    return {"text": text, "output_ids": list(ids), "meta_info": {"finish_reason": finish, **meta}}


def test_sampling_parameters_that_are_not_given_are_not_passed():
    assert sampling_params(Sampling(max_tokens=5)) == {"max_new_tokens": 5, "ignore_eos": False}
    given = sampling_params(Sampling(max_tokens=5, temperature=0.0, seed=7, min_tokens=2, stop=("x",)))
    assert given == {
        "max_new_tokens": 5, "ignore_eos": False, "temperature": 0.0, "sampling_seed": 7, "min_new_tokens": 2,
        "stop": ["x"],
    }  # fmt: skip


def test_a_decode_side_counts_all_sampled_tokens():
    answer = Answer(job(Phase.DECODE))
    answer.take(out([1], "a", prompt_tokens=10, completion_tokens=1, cached_tokens=4))
    answer.take(
        out([2, 3], "bc", {"type": "length", "length": 3}, prompt_tokens=10, completion_tokens=3, cached_tokens=4)
    )
    end = answer.end(abort_asked=False)
    assert end.reason is FinishReason.LENGTH
    assert end.counts == Counts(prompt_tokens=10, cached_tokens=4, completion_tokens=3)


def test_a_stop_string_is_reported_and_a_stop_token_is_not():
    for matched, reported in (("END", "END"), (2, "")):
        answer = Answer(job(Phase.UNIFIED))
        answer.take(out([1], "a", {"type": "stop", "matched": matched}, completion_tokens=1))
        end = answer.end(abort_asked=False)
        assert (end.reason, end.matched_stop) == (FinishReason.STOP, reported)


def test_a_prefill_side_counts_the_prompt_only():
    answer = Answer(job(Phase.PREFILL))
    answer.take(out([1], "a", {"type": "length", "length": 0}, prompt_tokens=10, completion_tokens=1, cached_tokens=4))
    end = answer.end(abort_asked=False)
    assert end.reason is FinishReason.STOP
    assert end.counts == Counts(prompt_tokens=10, cached_tokens=4, completion_tokens=0)


def test_a_prompt_that_was_aborted_in_the_queue_counts_nothing():
    answer = Answer(job(Phase.UNIFIED))
    answer.take({"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}})
    end = answer.end(abort_asked=True)
    assert (end.reason, end.error, end.counts) == (FinishReason.ABORTED, "", Counts())


FAILED = {"type": "abort", "message": "KVTransferError", "status_code": 500}
BAD = {"type": "abort", "message": "too long", "status_code": 400}


@pytest.mark.parametrize(
    ("phase", "tokens", "finish", "expected"),
    [
        (Phase.PREFILL, 0, FAILED, FinishReason.HAND_OFF),
        (Phase.DECODE, 0, FAILED, FinishReason.HAND_OFF),
        (Phase.DECODE, 2, FAILED, FinishReason.ERROR),
        (Phase.UNIFIED, 0, FAILED, FinishReason.ERROR),
        (Phase.DECODE, 0, BAD, FinishReason.ERROR),
    ],
)
def test_a_failure_is_blamed_on_the_hand_off_only_where_one_can_fail(phase, tokens, finish, expected):
    answer = Answer(job(phase))
    answer.take(out(range(tokens), "x" * tokens, finish))
    end = answer.end(abort_asked=False)
    assert end.reason is expected
    assert end.error == finish["message"]


def test_an_exception_is_an_error_whatever_the_phase():
    end = Answer(job(Phase.DECODE)).end(abort_asked=False, error="ValueError: no")
    assert (end.reason, end.error) == (FinishReason.ERROR, "ValueError: no")


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "overlapped_ms"),
    [
        (1000, 0, 100.0),  # two chunks: the first is sent during the second half of 200 ms
        (2048, 0, 150.0),  # four
        (512, 0, 0.0),  # one: nothing is sent before the end
        (1000, 512, 0.0),  # one is left to compute
    ],
)
def test_chunks_are_sent_while_later_ones_are_computed(prompt_tokens: int, cached_tokens: int, overlapped_ms: float):
    long = msgspec.structs.replace(job(Phase.PREFILL), prompt=pack_ids(range(prompt_tokens)))
    answer = Answer(long, chunk_tokens=512)
    computed = {"cached_tokens": cached_tokens, "forward_entry_time": 1000.0, "prefill_finished_time": 1000.2}
    answer.take(out([1], "a", {"type": "length", "length": 1}, **computed))
    assert answer.end(abort_asked=False).overlapped_ms == pytest.approx(overlapped_ms)
