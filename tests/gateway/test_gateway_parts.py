"""The gateway's pure parts and its small mechanisms, each by itself."""

import asyncio
import datetime as dt
import json
from pathlib import Path

import msgspec
import pytest
from gateway_rig import eventually
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import BadRequest, ContextTooLong, DependencyDown, NoCapacity
from contracts.lifecycle import FinishReason
from contracts.rating import CacheScope, Price, Tokens, cost
from contracts.settlement import LimitHit, Reserved
from contracts.units import Nano, NanoPerMillion
from contracts.wire import Refused
from gateway.auth import ASK_AGAIN_S, FRESH_S, STALE_S, Authenticator
from gateway.ids import hash_key, new_key
from gateway.limits import Limits, Need, Scope, affordable_tokens, claim, duration, headers
from gateway.outputs import EventStream
from gateway.prompt import TokenizerUnusable, load_prompt
from gateway.pump import begin
from gateway.refusals import error_of_refusal
from gateway.schemas.answers import Telling, money_text
from gateway.schemas.conversation import Message
from gateway.single_flight import SingleFlight
from gateway.sse import DONE, ChunkTemplate
from gateway.tenants import ApiKey
from gateway.writer import PING, PING_S, EventWriter

PRICE = Price(
    version=1,
    model="tiny",
    prefill_computed=NanoPerMillion(100_000_000),
    prefill_cached=NanoPerMillion(20_000_000),
    decode=NanoPerMillion(400_000_000),
)


def need(*, prompt: int = 10, max_tokens: int = 100, samples: int = 1) -> Need:
    return Need(prompt_tokens=prompt, max_tokens=max_tokens, paid_tokens=max_tokens, num_samples=samples, price=PRICE)


# -- limits ------------------------------------------------------------------------------------------------


def test_a_claim_names_every_limit_of_every_scope():
    scopes = (
        Scope("key", "key_1", Limits(requests_per_minute=5, concurrent_requests=2)),
        Scope("project", "proj_1", Limits()),
        Scope("org", "org_1", Limits(tokens_per_minute=1000, budget_nano=10**9)),
    )
    asked = claim("org_1", scopes, need(samples=2))
    assert [(rate.meter, rate.limit, rate.amount) for rate in asked.rates] == [
        ("requests", 5, 1),
        ("tokens", 1000, 10 + 2 * 100),
    ]
    assert [lease.limit for lease in asked.leases] == [2]
    assert [budget.amount for budget in asked.budgets] == [10 * 100 + 200 * 400]
    assert (asked.rate_scopes, asked.lease_scopes, asked.budget_scopes) == (["key", "org"], ["key"], ["org"])


@given(available=st.integers(-10, 10**9), prompt=st.integers(1, 10_000), samples=st.integers(1, 8), kind=st.booleans())
def test_what_a_limit_leaves_fits_into_that_limit(available: int, prompt: int, samples: int, kind: bool):
    limits = Limits(budget_nano=10**12) if kind else Limits(tokens_per_minute=10**12)
    asked = claim("org_1", (Scope("org", "org_1", limits),), need(prompt=prompt, samples=samples))
    hit = LimitHit("budget" if kind else "rate", 0, None, available)
    left = affordable_tokens(hit, asked, need(prompt=prompt, samples=samples))
    assert left >= 0
    if left:
        smaller = need(prompt=prompt, max_tokens=left, samples=samples)
        assert (smaller.cost_nano if kind else smaller.of("tokens")) <= available


def test_headers_show_the_tightest_scope():
    scopes = (
        Scope("key", "key_1", Limits(requests_per_minute=5)),
        Scope("org", "org_1", Limits(requests_per_minute=100)),
    )
    asked = claim("org_1", scopes, need())
    shown = headers(Reserved((4, 2), (12_000, 90_500)), asked)
    assert shown == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "1m30.5s",
    }
    assert [duration(ms) for ms in (0, 120, 1500, 360_000)] == ["0ms", "120ms", "1.5s", "6m0s"]


@given(st.integers(0, 2**53))
def test_money_as_text_is_exact(nano: int):
    whole, _, fraction = money_text(nano).partition(".")
    assert int(whole) * 10**9 + int(fraction.ljust(9, "0") or "0") == nano
    assert not fraction.endswith("0")


def test_keys_are_long_random_and_stored_as_a_hash():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("pdg_") and len(key) == 47 and key[4:].isalnum() for key in keys)
    assert len(hash_key(keys.pop())) == 32


def test_an_unknown_refusal_counts_as_no_capacity():
    error = error_of_refusal(Refused(rid="r", code="from_the_future", message="later", retry_after_s=2))
    assert isinstance(error, NoCapacity)
    assert error.retry_after_s == 2


def test_what_no_worker_can_take_is_the_callers_to_change():
    error = error_of_refusal(Refused(rid="r", code="context_length_exceeded", message="too long"))
    assert (error.http_status, error.code) == (400, "context_length_exceeded")


# -- prompts -------------------------------------------------------------------------------------------------


def test_a_prompt_is_the_templates_text_in_the_tokenizers_ids(models_dir: Path):
    prompt = load_prompt(models_dir / "tiny")
    messages = [Message("developer", "Be brief."), Message("user", "Hi")]
    text = prompt.render(messages)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = prompt.encode(messages, context_tokens=100)
    assert ids.count(1) == 3  # <|im_start|> is one token


def test_text_that_cannot_fit_is_refused_without_encoding_it(models_dir: Path):
    prompt = load_prompt(models_dir / "tiny")
    with pytest.raises(ContextTooLong, match="at least"):
        prompt.encode([Message("user", "x" * 50_000_000)], context_tokens=100)


def test_a_template_may_refuse_and_may_not_reach_out(models_dir: Path, tmp_path: Path):
    for name in ("tokenizer.json",):
        (tmp_path / name).write_bytes((models_dir / "tiny" / name).read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ raise_exception('roles must alternate') }}"}))
    with pytest.raises(BadRequest, match="roles must alternate"):
        load_prompt(tmp_path).render([Message("user", "x")])
    config.write_text(json.dumps({"chat_template": "{{ messages.__class__.__mro__ }}"}))
    with pytest.raises(BadRequest):
        load_prompt(tmp_path).render([Message("user", "x")])
    config.write_text(json.dumps({"eos_token": "x"}))
    with pytest.raises(TokenizerUnusable, match="chat_template"):
        load_prompt(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content | tojson }}")
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert load_prompt(tmp_path).render([Message("user", 'é"')]) == '<s>"é\\""'
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json"):
        load_prompt(tmp_path)


# -- event streams -----------------------------------------------------------------------------------------------


def event_stream(*, with_usage: bool = False) -> EventStream:
    template = ChunkTemplate(chunk_id="c", created_s=1, model="m", num_samples=1, with_usage=with_usage)
    loop = asyncio.get_running_loop()
    return EventStream(EventWriter(loop), template, num_samples=1, with_usage=with_usage, telling=Telling("EUR"))


class Sent(list[bytes]):
    """Collects what is sent; a gate that is shut makes `send` wait."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, event: dict[str, object]) -> None:
        await self.gate.wait()
        self.append(event["body"])


async def test_chunks_of_one_batch_are_one_send():
    stream, sent = event_stream(), Sent()
    async with asyncio.TaskGroup() as tasks:
        stream.placed()
        await stream.writer.head()
        pumping = tasks.create_task(stream.writer.pump(sent))
        await asyncio.sleep(0)
        stream.piece(0, "a")
        stream.piece(0, "b")
        stream.flush()
        assert len(sent) == 1  # already, without any task having run
        assert sent[0].count(b"data: ") == 2
        stream.abandoned()
        assert await pumping is False


async def test_a_server_that_is_behind_gets_the_rest_in_order_when_it_has_room():
    stream, sent = event_stream(), Sent()
    sent.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        stream.placed()
        await stream.writer.head()
        pumping = tasks.create_task(stream.writer.pump(sent))
        await asyncio.sleep(0)
        for text in ("a", "b", "c"):
            stream.piece(0, text)
            stream.flush()
        stream.sample_finished(0, FinishReason.STOP)
        assert sent == []
        sent.gate.set()
        stream.failed(NoCapacity("over"))
        assert await pumping is True
    body = b"".join(sent)
    contents = [body.index(b'"content":"%b"' % text) for text in (b"a", b"b", b"c")]
    assert contents == sorted(contents)
    assert body.count(b"data: ") == 5
    assert DONE not in body


async def test_silence_is_filled_with_comments_once_the_head_is_sent():
    stream, sent = event_stream(), Sent()
    later_s = stream.writer._last_sent_s + PING_S
    stream.tick(later_s)  # the head is held: no comment may be sent
    async with asyncio.TaskGroup() as tasks:
        stream.placed()
        await stream.writer.head()
        pumping = tasks.create_task(stream.writer.pump(sent))
        await asyncio.sleep(0)
        stream.tick(later_s - 1)
        assert sent == []
        stream.tick(later_s)
        assert sent == [PING]
        assert stream.first_sent_s is None  # a comment is no token
        stream.abandoned()
        await pumping


async def test_a_client_whose_connection_fails_ends_the_pump():
    stream = event_stream()

    async def send(_: object) -> None:
        raise RuntimeError("closed")

    stream.placed()
    await stream.writer.head()
    stream.piece(0, "a")
    assert await stream.writer.pump(send) is False


async def test_the_head_waits_until_its_time_is_up_and_no_longer():
    stream = event_stream()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(stream.writer.head())
        await asyncio.sleep(0)
        stream.tick(stream.writer._last_sent_s + PING_S - 1)
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.tick(stream.writer._last_sent_s + PING_S)
    assert stream.writer.refusal is None
    refused = event_stream()
    refused.failed(NoCapacity("no"))
    await refused.writer.head()
    assert isinstance(refused.writer.refusal, NoCapacity)


async def test_begin_runs_to_the_first_wait_and_the_rest_can_be_awaited():
    gate = asyncio.Event()
    seen = []

    async def work() -> None:
        seen.append("before")
        await gate.wait()
        seen.append("after")

    rest = begin(work())
    assert seen == ["before"]
    gate.set()
    assert rest is not None
    await rest
    assert seen == ["before", "after"]


async def test_a_burst_for_one_key_makes_one_call_and_shares_its_fault():
    calls = []
    gate = asyncio.Event()

    async def call() -> int:
        calls.append(1)
        await gate.wait()
        if len(calls) > 1:
            raise LookupError("second")
        return 7

    flight: SingleFlight[str, int] = SingleFlight()
    async with asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(flight.run("k", call)) for _ in range(5)]
        await asyncio.sleep(0)
        gate.set()
    assert [caller.result() for caller in callers] == [7] * 5
    assert len(calls) == 1
    with pytest.raises(LookupError):
        await flight.run("k", call)


async def test_a_caller_that_is_cancelled_takes_no_other_with_it():
    calls = []
    gate = asyncio.Event()

    async def call() -> int:
        calls.append(1)
        await gate.wait()
        return 7

    flight: SingleFlight[str, int] = SingleFlight()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(flight.run("k", call))
        others = [tasks.create_task(flight.run("k", call)) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        others[0].cancel()
        await eventually(lambda: len(calls) == 2)
        gate.set()
    assert first.cancelled()
    assert others[0].cancelled()
    assert [other.result() for other in others[1:]] == [7, 7]


async def test_a_database_that_hangs_delays_one_request_of_a_key_not_each():
    now_s, asked = 0.0, []
    key = ApiKey(
        id="key_1",
        organisation_id="org_1",
        project_id="proj_1",
        name="test",
        prefix="pdg_abc",
        state="active",
        version=1,
        is_admin=False,
        created_at=dt.datetime.now(dt.UTC),
        expires_at=None,
        limits=Limits(),
        project_limits=Limits(),
        organisation_limits=Limits(),
    )

    class Hanging:
        async def find_by_hash(self, key_hash: bytes) -> ApiKey | None:
            asked.append(key_hash)
            if len(asked) > 1:
                raise TimeoutError
            return key

    auth = Authenticator(Hanging(), None, None, max_entries=10, now_s=lambda: now_s)
    for at_s, times in ((0.0, 1), (FRESH_S + 1, 2), (FRESH_S + 2, 2), (FRESH_S + 2 + ASK_AGAIN_S, 3)):
        now_s = at_s
        assert await auth.authenticate("Bearer pdg_abcdef") is key
        assert len(asked) == times
    now_s = STALE_S + 1
    with pytest.raises(DependencyDown):
        await auth.authenticate("Bearer pdg_abcdef")


@pytest.mark.parametrize(
    ("changes", "nano"),
    [
        ({}, 10 * 100 + 100 * 400),
        ({"prefill_cached": NanoPerMillion(150_000_000)}, 10 * 150 + 100 * 400),  # cached tokens may cost more
        ({"prefill_shared": NanoPerMillion(300_000_000)}, 10 * 300 + 100 * 400),
        ({"minimum": Nano(50_000)}, 50_000),
        ({"minimum": Nano(100)}, 10 * 100 + 100 * 400),
    ],
)
def test_money_is_reserved_for_the_most_that_a_request_may_cost(changes, nano):
    price = msgspec.structs.replace(PRICE, **changes)
    wanted = Need(prompt_tokens=10, max_tokens=100, paid_tokens=100, num_samples=1, price=price)
    assert wanted.cost_nano == nano
    for cached in range(11):
        tokens = Tokens(prefill_computed=10 - cached, prefill_cached=cached, decode=100)
        assert all(cost(tokens, price, scope=scope) <= nano for scope in CacheScope)
