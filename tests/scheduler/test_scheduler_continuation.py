"""Answers that go on elsewhere when their worker is lost after the client has tokens of them."""

import msgspec
import pytest
from rig import SLOW_DECODE, SLOW_PREFILL, Rig, eventually, state_of

from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, Path, RequestState, Role
from contracts.wire import pack_ids, unpack_ids
from scheduler.retries import RetryBudget
from workers.engines.timed_text import expected_ids, expected_text

NUM_TOKENS = 40


def prompt_of(request) -> list[int]:
    return unpack_ids(request.submit.prompt)


def whole(request, attempts: int, sample: int = 0) -> tuple[list[int], str]:
    """What a client has after all attempts."""
    numbers = range(1, attempts + 1)
    ids = [i for a in numbers for i in request.tokens.get((a, sample), [])]
    return ids, "".join(request.texts.get((a, sample), "") for a in numbers)


@pytest.mark.parametrize("spare", [Role.DECODE, Role.UNIFIED])
async def test_a_lost_decode_worker_costs_the_client_no_token_and_repeats_none(rig: Rig, spare: Role):
    await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS)
    await eventually(lambda: len(request.tokens.get((1, 0), [])) >= 5)
    await decode.kill()
    await rig.worker(spare)
    await eventually(lambda: request.lost)
    await gateway.go_on(request, lost_attempt=1)
    await gateway.go_on(request, lost_attempt=1)  # a repeated answer starts nothing more
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    prompt = prompt_of(request)
    assert whole(request, 2) == (expected_ids(prompt, NUM_TOKENS), expected_text(prompt, NUM_TOKENS))
    assert request.placed[-1].path is (Path.PD if spare is Role.DECODE else Path.FALLBACK)
    assert [p.attempt for p in request.placed] == [1, 2]
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)
    assert pool.term.book.get(request.rid).num_delivered == len(request.tokens[1, 0])


async def test_an_answer_that_is_whole_where_its_gateway_cannot_read_it_goes_on_elsewhere(rig: Rig):
    """The link between a gateway and a worker is cut: the scheduler sees a whole answer, the client only its head."""
    first = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS)
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    spare = await rig.worker(Role.UNIFIED)
    await eventually(lambda: sum(w.ready for w in pool.registry.workers()) == 2)
    head_ids, head_text = request.tokens[1, 0][:5], expected_text(prompt_of(request), 5)
    for _ in range(2):  # a repeated answer starts nothing more
        await gateway.go_on(request, lost_attempt=1, delivered=(pack_ids(head_ids),), delivered_chars=(len(head_text),))
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert head_text + request.texts[2, 0] == expected_text(prompt_of(request), NUM_TOKENS)
    assert [len(w.submitted) for w in (first, spare)] == [1, 1]
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)


async def test_wrong_delivered_tokens_lead_to_another_text(rig: Rig):
    """The negative control of the test above: the continuation does depend on what it is given."""
    first = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS)
    await eventually(lambda: len(request.tokens.get((1, 0), [])) >= 5)
    await first.kill()
    await rig.worker(Role.UNIFIED)
    await eventually(lambda: request.lost)
    ids = list(request.tokens[1, 0])
    ids[0] = 32 if ids[0] != 32 else 33
    await gateway.go_on(request, lost_attempt=1, delivered=(pack_ids(ids),))
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert whole(request, 2)[0] != expected_ids(prompt_of(request), NUM_TOKENS)


async def test_a_continuation_that_is_lost_as_well_goes_on_from_there(rig: Rig):
    workers = [await rig.worker(Role.UNIFIED, SLOW_DECODE)]
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS)
    for attempt in (1, 2):
        await eventually(lambda attempt=attempt: len(request.tokens.get((attempt, 0), [])) >= 3)
        workers.append(await rig.worker(Role.UNIFIED, SLOW_DECODE))
        await workers[attempt - 1].kill()
        await eventually(lambda attempt=attempt: len(request.lost) == attempt)
        await gateway.go_on(request, lost_attempt=attempt)
    await eventually(lambda: request.reason(attempt=3) is FinishReason.LENGTH)
    prompt = prompt_of(request)
    assert whole(request, 3) == (expected_ids(prompt, NUM_TOKENS), expected_text(prompt, NUM_TOKENS))


async def test_only_the_samples_that_are_not_whole_run_again(rig: Rig):
    first = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS, num_samples=2, temperature=0.0)
    await eventually(lambda: all(len(request.tokens.get((1, s), [])) >= 3 for s in (0, 1)))
    await first.kill()
    second = await rig.worker(Role.UNIFIED)
    await eventually(lambda: request.lost)
    await gateway.go_on(request, lost_attempt=1, done=(0,))
    await eventually(lambda: request.reason(attempt=2, sample=1) is FinishReason.LENGTH)
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)
    assert [a.sample for a in second.submitted] == [1]


@pytest.mark.parametrize(
    ("sampling", "feature"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"min_tokens": 39}, "min_tokens"),
    ],
)
async def test_an_answer_whose_state_is_lost_is_refused_not_continued(rig: Rig, sampling: dict, feature: str):
    first = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS, **sampling)
    await eventually(lambda: request.tokens)
    await first.kill()
    spare = await rig.worker(Role.UNIFIED)
    await eventually(lambda: request.lost)
    await gateway.go_on(request, lost_attempt=1)
    await eventually(lambda: request.refused)
    assert request.refused[0].code == "interrupted"
    assert feature in request.refused[0].message
    assert state_of(pool, request) is RequestState.FAILED
    assert not spare.submitted


async def test_a_new_leader_does_not_run_a_continuation_from_the_beginning(rig: Rig):
    """Only the gateway knows what was delivered, and the entry that said so is acknowledged."""
    first = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    leader = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=NUM_TOKENS)
    await eventually(lambda: len(request.tokens.get((1, 0), [])) >= 3)
    await first.kill()
    await eventually(lambda: request.lost)
    second = await rig.worker(Role.UNIFIED, SLOW_PREFILL)
    await gateway.go_on(request, lost_attempt=1)
    await eventually(lambda: second.submitted)
    await rig.kill(leader)
    await second.kill()
    await rig.worker(Role.UNIFIED)
    rig.scheduler()
    await eventually(lambda: [(n.attempt, n.retrying) for n in request.lost][1:] == [(2, False)])
    await gateway.go_on(request, lost_attempt=2)
    await eventually(lambda: request.reason(attempt=3) is FinishReason.LENGTH)
    prompt = prompt_of(request)
    assert whole(request, 3) == (expected_ids(prompt, NUM_TOKENS), expected_text(prompt, NUM_TOKENS))


async def test_a_spent_budget_refuses_what_it_cannot_compute_again(rig: Rig):
    first = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    requests = [await gateway.submit(60, max_tokens=NUM_TOKENS) for _ in range(2)]
    await eventually(lambda: all(request.tokens for request in requests))
    budget = pool.term.retries._budget = RetryBudget(floor_tokens=lambda: 0, now_s=lambda: 0.0)
    assert budget.take(int(budget.left_tokens) - 100)  # prompt and answer: enough for one, not for both
    await first.kill()
    await rig.worker(Role.UNIFIED)
    await eventually(lambda: all(request.lost for request in requests))
    for request in requests:
        await gateway.go_on(request, lost_attempt=1)
    await eventually(lambda: sum(bool(request.refused) for request in requests) == 1)
    await eventually(lambda: sum(r.reason(attempt=2) is FinishReason.LENGTH for r in requests) == 1)


def test_the_budget_is_a_tenth_of_what_is_computed_and_comes_back_to_its_floor():
    now_s = [0.0]
    budget = RetryBudget(floor_tokens=lambda: 60_000, now_s=lambda: now_s[0])
    assert budget.left_tokens == 60_000
    assert budget.take(60_000)
    assert not budget.take(1)
    now_s[0] = 30.0
    assert budget.left_tokens == 30_000
    now_s[0] = 300.0
    assert budget.left_tokens == 60_000  # idle time alone gives no more
    budget.earn(100_000)
    assert budget.left_tokens == 70_000
    budget.earn(10**9)
    assert budget.left_tokens == 1_000_000


async def test_a_request_that_nobody_knows_ends_when_its_gateway_asks_for_the_second_time(rig: Rig):
    """Its entry and its record were lost with Redis' data: waiting for its deadline would help nobody."""
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    known = await gateway.submit(max_tokens=2)
    await eventually(lambda: known.reason() is FinishReason.LENGTH)
    lost = msgspec.structs.replace(known.submit, rid=new_rid(1_790_000_000_000))
    request = gateway.requests[lost.rid] = type(known)(lost, b"0-1")
    await gateway.go_on(request, lost_attempt=1, gateway_id=gateway.gateway_id)
    after = await gateway.submit(max_tokens=2)
    await eventually(lambda: after.reason() is FinishReason.LENGTH)
    assert not request.refused
    await gateway.go_on(request, lost_attempt=1, gateway_id=gateway.gateway_id)
    await eventually(lambda: request.refused)
    assert request.refused[0].code == "interrupted"
