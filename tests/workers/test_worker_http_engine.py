"""A server that runs already as an engine: text, counts, aborts by disconnect, health, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from contracts.identity import new_rid
from contracts.lifecycle import FinishReason, HandOff, Phase, Role
from contracts.parsing import Parsing
from contracts.wire import Attempt, Counts, Sampling, counts_from_pb, counts_to_pb, pack_ids
from tests.conftest import tiny_tokenizer
from tests.processes import until
from tests.workers.openai_server import WORDS, OpenaiServer, running_server
from workers.engine import End, Job, Refusal, SwitchRefused
from workers.engines.http import HttpEngine, HttpOptions

TOKENIZER = tiny_tokenizer()
TEXT = "".join(WORDS)


class Collected:
    """An outlet."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.ended: End | None = None

    def chunk(self, text, token_ids, detail=None) -> None:
        self.text += text
        self.ids += token_ids

    def prefilled(self, counts, stages) -> None: ...

    def end(self, end: End) -> None:
        assert self.ended is None
        self.ended = end


def job(**changes) -> Job:
    sampling = {name: changes.pop(name) for name in list(changes) if name in Sampling.__struct_fields__}
    values = {
        "attempt": Attempt(new_rid(0), 1),
        "phase": Phase.UNIFIED,
        "gateway_id": "gw",
        "deadline_unix_ms": 0,
        "prompt": pack_ids(range(10)),
        "sampling": Sampling(**{"max_tokens": 50, **sampling}),
    }
    return Job(**{**values, **changes})


@asynccontextmanager
async def engine_on(server: OpenaiServer, **changes) -> AsyncIterator[HttpEngine]:
    values = {"url": server.url, "model": "there", "kv_capacity_tokens": 1000, "max_running": 2, "context_tokens": 2048}
    engine = HttpEngine(HttpOptions(**{**values, **changes}), TOKENIZER)
    facts = await engine.start(Role.UNIFIED)
    assert (facts.name, facts.role, facts.hand_offs) == ("http", Role.UNIFIED, (HandOff.DIRECT,))
    assert facts.context_tokens == 512  # the server's own, which is less than the catalogue's
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.run())
        await asyncio.sleep(0)
        try:
            yield engine
        finally:
            running.cancel()


async def answered(engine: HttpEngine, of: Job) -> Collected:
    outlet = Collected()
    engine.submit(of, outlet)
    await until(lambda: outlet.ended, 10)
    return outlet


async def test_the_servers_text_and_its_usage_become_the_answer():
    async with running_server() as server, engine_on(server, fields={"extra": 1}, key="secret") as engine:
        salted = job(temperature=0.5, stop=("END",), seed=7, logit_bias={5: 1.5}, cache_salt="tenant")
        outlet = await answered(engine, salted)
    assert outlet.text == TEXT == TOKENIZER.decode(outlet.ids)
    assert outlet.ended.reason is FinishReason.STOP
    assert outlet.ended.counts == Counts(prompt_tokens=10, cached_tokens=4, completion_tokens=len(WORDS))
    [asked] = server.asked
    assert asked == {
        "model": "there", "prompt": list(range(10)), "max_tokens": 50, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.5, "stop": ["END"], "seed": 7,
        "logit_bias": {"5": 1.5}, "cache_salt": "tenant", "extra": 1,
    }  # fmt: skip


async def test_without_usage_counts_are_estimates_and_say_so():
    async with running_server() as server, engine_on(server) as engine:
        server.tells_usage = False
        outlet = await answered(engine, job(max_tokens=3))
    assert outlet.ended.reason is FinishReason.LENGTH
    counts = outlet.ended.counts
    assert counts == Counts(prompt_tokens=10, completion_tokens=len(outlet.ids), estimated=True)
    assert counts_from_pb(counts_to_pb(counts)) == counts


async def test_an_abort_closes_the_connection_and_counts_what_came():
    async with running_server() as server, engine_on(server) as engine:
        server.held.clear()
        one, outlet = job(), Collected()
        engine.submit(one, outlet)
        await until(lambda: outlet.text, 10)
        assert engine.load().num_running == 1
        engine.abort(one)
        engine.abort(one)
        await until(lambda: outlet.ended, 10)
        await until(lambda: server.left == 1, 10)
        assert (engine.load().num_running, engine.load().kv_used_tokens) == (0, 0)
    assert outlet.ended.reason is FinishReason.ABORTED
    assert outlet.ended.counts == Counts(prompt_tokens=10, completion_tokens=len(outlet.ids), estimated=True)


async def test_an_abort_in_the_instant_of_submission_ends_the_job_as_well():
    async with running_server() as server, engine_on(server) as engine:
        one, outlet = job(), Collected()
        engine.submit(one, outlet)
        engine.abort(one)
        await until(lambda: outlet.ended, 10)
        assert (outlet.ended.reason, outlet.ended.counts) == (FinishReason.ABORTED, Counts())
        assert (await answered(engine, job())).text == TEXT


async def test_a_continuation_sends_the_answer_so_far_and_asks_for_the_rest():
    said = TOKENIZER.encode("It is", add_special_tokens=False).ids
    async with running_server() as server, engine_on(server) as engine:
        outlet = await answered(engine, job(delivered=pack_ids(said), delivered_chars=3, min_tokens=4))
    [asked] = server.asked
    assert asked["prompt"] == [*range(10), *said]
    assert asked["max_tokens"] == 50 - len(said)
    assert "min_tokens" not in asked
    assert outlet.text == "is" + TEXT  # the client had "It "


async def test_a_server_that_is_down_takes_nothing_and_is_out_of_service_until_it_answers(monkeypatch):
    monkeypatch.setattr("workers.engines.http.DOWN_AFTER_S", 1.0)
    async with running_server() as server, engine_on(server) as engine:
        assert not engine.load().out_of_service
        server.healthy = False
        await until(lambda: engine.load().out_of_service, 20)
        with pytest.raises(Refusal) as refused:
            engine.submit(job(), Collected())
        assert refused.value.code == "unhealthy"
        server.healthy = True
        await until(lambda: not engine.load().out_of_service, 20)
        assert (await answered(engine, job())).text == TEXT


async def test_what_the_server_refuses_ends_the_job_with_its_words():
    async with running_server() as server, engine_on(server) as engine:
        outlet = await answered(engine, job(temperature=99.0))
    assert outlet.ended.reason is FinishReason.ERROR
    assert outlet.ended.error.startswith("400 ")
    assert "out of range" in outlet.ended.error


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"parsing": Parsing(tool_parser="hermes")}, "tools"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"adapter": "tuned"}, "model"),
        ({"phase": Phase.PREFILL, "hand_off": HandOff.DIRECT}, "phase"),
    ],
)
async def test_what_it_cannot_do_is_refused_before_the_server_is_asked(changes: dict, parameter: str):
    async with running_server() as server, engine_on(server) as engine:
        with pytest.raises(Refusal, match=f"^'{parameter}'") as refused:
            engine.submit(job(**changes), Collected())
        assert refused.value.code == "bad_request"
        assert engine.load().num_running == 0
    assert not server.asked


async def test_it_takes_no_more_than_it_was_told_and_no_other_role():
    async with running_server() as server, engine_on(server) as engine:
        server.held.clear()
        for _ in range(2):
            engine.submit(job(), Collected())
        with pytest.raises(Refusal) as refused:
            engine.submit(job(), Collected())
        assert refused.value.code == "full"
        with pytest.raises(SwitchRefused):
            await engine.switch(Role.DECODE)
    options = msgspec.structs.replace(engine._options, url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="unified"):
        await HttpEngine(options, TOKENIZER).start(Role.PREFILL)


async def test_a_model_that_the_server_has_not_is_said_at_the_start():
    async with running_server() as server:
        options = HttpOptions(
            url=server.url, model="elsewhere", kv_capacity_tokens=1000, max_running=2, context_tokens=100
        )
        with pytest.raises(ValueError, match="no model 'elsewhere'"):
            await HttpEngine(options, TOKENIZER).start(Role.UNIFIED)
