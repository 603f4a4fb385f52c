"""Timers apart: the first token, the next one, the whole; and what an attempt that is silent for too long leads to."""

import asyncio
import time

import pytest
from gateway_rig import HELLO, Rig, events_of, eventually

from contracts.lifecycle import FinishReason, Phase
from contracts.usage import Outcome
from contracts.wire import Continue
from gateway.patience import MAX_ATTEMPTS, Patience, Silence

PATIENCE = Patience(first_token_s=10, first_token_s_per_1000=5, between_tokens_s=3)


class Ways:
    """Links of which a test says whether they stand."""

    def __init__(self, *, up=True):
        self.up = up
        self.doubts = 0

    def reachable(self, worker_id):
        return self.up

    def doubt(self, worker_id):
        self.doubts += 1


def given_up_after(looks, *, prompt_tokens=2000, links=None):
    """Return the causes with their time. `looks` are (time, attempt, tokens)."""
    silence, causes = Silence(), []
    links = links or Ways()
    for now_s, attempt, num_tokens in looks:
        silence.look(
            now_s,
            PATIENCE,
            attempt=attempt,
            num_tokens=num_tokens,
            prompt_tokens=prompt_tokens,
            begun=num_tokens > 0,
            worker_id="decode-0",
            links=links,
            give_up=lambda cause, now_s=now_s: causes.append((now_s, cause)),
        )
    return causes


@pytest.mark.parametrize(
    ("looks", "causes"),
    [
        ([(t, 1, 0) for t in range(21)], []),  # 10 s, and 5 for each thousand of 2,000 prompt tokens
        ([(t, 1, 0) for t in range(22)], [(21, "no_first_token")]),
        ([(t, 1, t) for t in range(1, 100)], []),  # slow, and never silent
        ([(0, 1, 0), (1, 1, 1), (4, 1, 1), (5, 1, 1)], [(5, "no_next_token")]),
        ([(0, 1, 0), (20, 2, 0), (40, 2, 0)], []),  # another attempt has its own clock
        ([(t, MAX_ATTEMPTS, 0) for t in range(600)], []),  # the last one gets the whole deadline
    ],
)
def test_an_attempt_may_be_silent_for_so_long(looks, causes):
    assert given_up_after(looks) == causes


@pytest.mark.parametrize(
    ("looks", "causes"),
    [
        ([(t, 1, 0) for t in range(9)], [(0, "unreachable")]),  # at once, and once
        ([(0, 1, 0), (1, 2, 0), (2, 2, 0)], [(0, "unreachable"), (1, "unreachable")]),
        ([(t, MAX_ATTEMPTS, 0) for t in range(9)], []),
        ([(t, 1, t) for t in range(1, 9)], []),  # tokens have come: the worker's ring may bridge the gap
    ],
)
def test_an_attempt_on_a_worker_out_of_reach_is_given_up_before_its_first_token(looks, causes):
    assert given_up_after(looks, links=Ways(up=False)) == causes


@pytest.mark.parametrize(
    ("looks", "doubts"),
    [([(0, 1, 0), (1, 1, 0)], 2), ([(0, 1, 0), (1, 1, 1), (2, 1, 1)], 2), ([(t, 1, t) for t in range(1, 9)], 0)],
)
def test_the_link_of_a_silent_worker_is_doubted(looks, doubts):
    links = Ways()
    given_up_after(looks, links=links)
    assert links.doubts == doubts


async def test_an_attempt_without_a_first_token_is_given_up_and_another_one_answers(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        stuck = await rig.decode.open(submit.rid, Phase.UNIFIED)
        generation = await eventually(lambda: rig.gateway.table.find(submit.rid))
        await eventually(lambda: generation.placed)
        now_s = time.monotonic()
        generation.tick(now_s, PATIENCE)
        generation.tick(now_s + 9.9, PATIENCE)
        assert not rig.decode.aborts
        generation.tick(now_s + 10.1, PATIENCE)
        await eventually(lambda: rig.decode.aborts)
        entry = await rig.scheduler.next()
        assert isinstance(entry, Continue)
        assert (entry.lost_attempt, entry.delivered) == (1, ())
        await rig.scheduler.placed(submit, decode=rig.prefill, attempt=2)
        again = await rig.prefill.open(submit.rid, Phase.UNIFIED, attempt=2)
        await stuck.tokens("too late")
        await again.tokens("in time")
        await again.finish(FinishReason.STOP, prompt=8, completion=1)
    assert asked.result().json()["choices"][0]["message"]["content"] == "in time"
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.attempts) == (Outcome.FINISHED, 2)


async def test_an_answer_that_stops_in_the_middle_goes_on_elsewhere(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        silent = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await silent.tokens("one ")
        generation = rig.gateway.table.find(submit.rid)
        await eventually(lambda: generation.accepted and generation.placed)
        now_s = time.monotonic()
        generation.tick(now_s, PATIENCE)
        generation.tick(now_s + 3.1, PATIENCE)
        entry = await rig.scheduler.next()
        assert isinstance(entry, Continue)
        assert any(entry.delivered)
        await rig.scheduler.placed(submit, decode=rig.prefill, attempt=2)
        again = await rig.prefill.open(submit.rid, Phase.UNIFIED, attempt=2)
        await again.tokens("two")
        await again.finish(FinishReason.STOP, prompt=8, completion=2)
    events = events_of(asked.result().text)
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert (said, events[-1]) == ("one two", "[DONE]")
