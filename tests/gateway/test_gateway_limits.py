"""Limits over three gateways: exact under racing clients, whatever becomes of the requests."""

import asyncio
import contextlib
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import HELLO, POOL, PeerScheduler, PeerWorker, Rig, eventually, running_rig

from billing.budgets import Budget, Budgets, set_budget
from contracts import keys
from contracts.lifecycle import FinishReason, Phase, Role
from contracts.resp import RespConnection
from contracts.settlement import SettlementScripts
from contracts.usage import Outcome
from contracts.wire import Change, Continue, Submit
from gateway.changes import announce
from gateway.limits import Limits
from gateway.tenants import publish_key_state


class Replicas:
    """Several gateways of one installation, which share a tenant, and one worker that answers for all."""

    def __init__(self, rigs: list[Rig]) -> None:
        self.rigs = rigs
        self.first = rigs[0]
        self.scheduler: PeerScheduler = self.first.scheduler
        self.worker: PeerWorker = self.first.decode

    async def tenant(self, **limits: Any) -> None:
        secret = await self.first.tenant(**limits)
        for rig in self.rigs[1:]:
            rig.org, rig.key = self.first.org, self.first.key
            rig.client.headers["authorization"] = f"Bearer {secret}"

    async def ask(self, i: int, **changes: Any):
        body = {**HELLO, **changes}
        return await self.rigs[i % len(self.rigs)].client.post("/v1/chat/completions", content=json.dumps(body))

    async def serve(self, submit: Submit, *, tokens: int, cached: int = 0) -> None:
        """Answer one request with `tokens` tokens."""
        prompt = len(submit.prompt) // 4
        await self.scheduler.placed(submit, decode=self.worker)
        handle = await self.worker.open(submit.rid, Phase.UNIFIED)
        await handle.tokens(*["x"] * tokens)
        await handle.finish(FinishReason.STOP, prompt=prompt, cached=cached, completion=tokens)

    async def levels(self) -> dict[str, int]:
        """Return what is taken of each bucket, by meter, as it stands without refill."""
        found = {}
        async for key in self.first.redis.scan_iter(match=f"*:org:{self.first.org.id}:rate:*"):
            level = await self.first.redis.hget(key, "level")
            found[key.decode().rpartition(":")[2]] = int(level)
        return found

    async def running(self) -> int:
        key = keys.concurrency_leases(self.first.org.id, "key", self.first.key.id)
        return await self.first.redis.zcard(key)


@pytest.fixture
async def replicas(
    redis_url: str, database_url: str, catalog_file: Path, catalog: Any, models_dir: Path, tmp_path: Path
):
    async with contextlib.AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(
                running_rig(
                    redis_url=redis_url,
                    database_url=database_url,
                    catalog_file=catalog_file,
                    catalog=catalog,
                    models_dir=models_dir,
                    journal_dir=tmp_path / str(i),
                )
            )
            for i in range(3)
        ]
        shared = rigs[0]
        await shared.unregister(shared.prefill)
        await shared.unregister(shared.decode)
        worker = PeerWorker("unified-0", Role.UNIFIED)
        await worker.start()
        for rig in rigs:
            await rig.register(worker)
        group = Replicas(rigs)
        group.worker = worker
        await group.tenant()
        yield group
        await worker.stop()


async def test_racing_clients_of_three_replicas_never_exceed_the_concurrency_by_one(replicas: Replicas):
    await replicas.tenant(limits=Limits(concurrent_requests=4))
    seen: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        racing = [tasks.create_task(replicas.ask(i, stream=True)) for i in range(24)]
        submits = [await replicas.scheduler.submit() for _ in range(4)]
        seen.append(await replicas.running())
        await eventually(lambda: sum(task.done() for task in racing) == 20)
        assert {task.result().status_code for task in racing if task.done()} == {429}
        seen.append(await replicas.running())
        for submit in submits:
            await replicas.serve(submit, tokens=2)
    assert sorted(task.result().status_code for task in racing) == [200] * 4 + [429] * 20
    assert seen == [4, 4]
    await eventually(lambda: _none(replicas.running()))


async def test_a_limit_of_requests_does_not_multiply_by_the_replicas(replicas: Replicas):
    await replicas.tenant(limits=Limits(requests_per_minute=6), org_limits=Limits(requests_per_minute=5))
    async with asyncio.TaskGroup() as tasks:
        racing = [tasks.create_task(replicas.ask(i)) for i in range(18)]
        # Five at once, and one more of every 12 s in which this runs.
        for _ in range(5):
            await replicas.serve(await replicas.scheduler.submit(), tokens=1)
        await eventually(lambda: sum(task.done() for task in racing) == 18)
    refused = [task.result() for task in racing if task.result().status_code == 429]
    assert len(refused) == 13
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in refused} == {"5"}
    assert {answer.headers["x-ratelimit-remaining-requests"] for answer in refused} == {"0"}
    assert all(1 <= int(answer.headers["retry-after"]) <= 12 for answer in refused)
    # The key's own bucket was not burnt by what the organisation's refused: 1 of 6 is left.
    bucket = keys.rate_bucket(replicas.first.org.id, "key", replicas.first.key.id, "requests")
    assert int(await replicas.first.redis.hget(bucket, "level")) // 1000 == 1


async def test_a_budget_of_racing_clients_is_spent_to_the_last_request_it_pays_for_and_not_beyond(replicas: Replicas):
    await replicas.tenant()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(replicas.ask(0, max_tokens=20))
        submit = await replicas.scheduler.submit()
        prompt = len(submit.prompt) // 4
        await replicas.serve(submit, tokens=20)
    assert first.result().status_code == 200
    each = prompt * 100 + 20 * 400
    await replicas.tenant(org_limits=Limits(budget_nano=3 * each + each // 2))
    async with asyncio.TaskGroup() as tasks:
        racing = [tasks.create_task(replicas.ask(i, max_tokens=20)) for i in range(12)]
        submits = [await replicas.scheduler.submit() for _ in range(3)]
        await eventually(lambda: sum(task.done() for task in racing) == 9)
        for submit in submits:
            await replicas.serve(submit, tokens=20)
    refused = [task.result() for task in racing if task.result().status_code != 200]
    assert {answer.json()["error"]["code"] for answer in refused} == {"insufficient_quota"}
    for submit in submits:
        await replicas.first.usage(submit.rid)
    org = replicas.first.org.id
    money = await replicas.first.redis.hgetall(keys.budget(org, "org", org))
    assert {name: int(value) for name, value in money.items()} == {b"spent": 3 * each, b"reserved": 0}


async def test_663_tokens_do_not_pass_a_limit_of_100(replicas: Replicas):
    await replicas.tenant(limits=Limits(generated_tokens_per_minute=100))
    over = await replicas.ask(0, max_tokens=663)
    assert over.status_code == 429
    assert over.headers["x-should-retry"] == "false"  # waiting never helps
    assert over.headers["x-ratelimit-remaining-tokens-generated"] == "100"  # and nothing was burnt
    async with asyncio.TaskGroup() as tasks:
        default = tasks.create_task(replicas.ask(1))
        submit = await replicas.scheduler.submit()
        assert submit.sampling.max_tokens == 100  # neither refused nor unbounded
        second = await replicas.ask(2)
        assert second.status_code == 429
        await replicas.serve(submit, tokens=100)
    assert default.result().status_code == 200
    assert (await replicas.ask(0, max_tokens=50)).status_code == 429


async def test_a_limit_that_leaves_fewer_than_16_tokens_refuses(lone: Replicas):
    replicas = lone
    await replicas.tenant(limits=Limits(generated_tokens_per_minute=15))
    assert (await replicas.ask(0)).status_code == 429
    await replicas.tenant(limits=Limits(generated_tokens_per_minute=16))
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(replicas.ask(0))
        submit = await replicas.scheduler.submit()
        assert submit.sampling.max_tokens == 16
        await replicas.serve(submit, tokens=16)
    assert asked.result().status_code == 200


async def test_cached_tokens_are_part_of_the_prompt_and_not_counted_on_top(lone: Replicas):
    replicas = lone
    await replicas.tenant(
        limits=Limits(
            prompt_tokens_per_minute=6000,
            uncached_prompt_tokens_per_minute=6000,
            generated_tokens_per_minute=6000,
            tokens_per_minute=6000,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(replicas.ask(0, max_tokens=100))
        submit = await replicas.scheduler.submit()
        prompt = len(submit.prompt) // 4
        await replicas.serve(submit, tokens=10, cached=prompt - 3)
    answer = asked.result()
    assert answer.json()["usage"]["prompt_tokens"] == prompt
    assert answer.json()["usage"]["total_tokens"] == prompt + 10
    await replicas.first.usage(submit.rid)
    taken = {meter: 6000 - level / 1000 for meter, level in (await replicas.levels()).items()}
    # Refill is 100 a second, so what is taken is read as at most, and the order tells the meters apart.
    assert prompt - taken["prompt_tokens"] + 1 > 0
    assert taken["prompt_tokens"] <= prompt
    assert taken["uncached_prompt_tokens"] <= 3
    assert taken["generated_tokens"] <= 10
    assert taken["tokens"] <= prompt + 10


@pytest.fixture
def lone(rig: Rig) -> Replicas:
    """One gateway, where more would show nothing else."""
    return Replicas([rig])


OUTCOMES = ["finished", "refused", "client_left", "interrupted", "not_written"]


async def test_buckets_and_leases_are_back_after_every_outcome(lone: Replicas):
    """In-flight counters must not leak until Redis restarts."""
    for outcome in OUTCOMES:
        await check_that_all_is_back(lone, outcome)


async def check_that_all_is_back(replicas: Replicas, outcome: str) -> None:
    await replicas.tenant(
        limits=Limits(concurrent_requests=2, generated_tokens_per_minute=6000, budget_nano=10_000_000)
    )
    first = replicas.first
    if outcome == "not_written":
        broken = first.gateway.inbox._connection
        first.gateway.inbox._connection = RespConnection("redis://127.0.0.1:1")
        answer = await replicas.ask(0, max_tokens=100)
        first.gateway.inbox._connection = broken
        assert answer.status_code == 503
    else:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(replicas.ask(0, max_tokens=100, stream=True))
            while not isinstance(submit := await replicas.scheduler.next(), Submit):
                pass  # aborts of the outcome before
            assert await replicas.running() == 1
            match outcome:
                case "finished":
                    await replicas.serve(submit, tokens=1)
                case "refused":
                    await replicas.scheduler.refused(submit, "no_capacity", "full", 1)
                case "client_left":
                    asked.cancel()
                    await eventually(lambda: first.gateway.table.find(submit.rid).ending)
                    await replicas.scheduler.refused(submit, "interrupted", "aborted before placement")
                case "interrupted":
                    await replicas.scheduler.placed(submit, decode=replicas.worker)
                    handle = await replicas.worker.open(submit.rid, Phase.UNIFIED)
                    await handle.tokens("x")
                    await handle.finish(FinishReason.ERROR, prompt=8, completion=1)
                    assert isinstance(await replicas.scheduler.next(), Continue)
                    await replicas.scheduler.refused(submit, "interrupted", "no worker goes on")
    await eventually(lambda: _none(replicas.running()))
    await eventually(lambda: _none(first.redis.zcard(keys.open_reservations(first.org.id))))
    money = await first.redis.hgetall(keys.budget(first.org.id, "key", first.key.id))
    assert int(money[b"reserved"]) == 0
    assert (int(money[b"spent"]) > 0) == (outcome == "finished")
    generated = (await replicas.levels())["generated_tokens"]
    assert generated >= 5_999_000  # one token at most is taken


async def test_while_limits_cannot_be_checked_a_few_requests_pass_and_are_charged_later(lone: Replicas):
    """The shard of limits is away, the inbox is not, as over a Redis cluster."""
    replicas = lone
    await replicas.tenant(limits=Limits(requests_per_minute=100, budget_nano=10_000_000))
    first = replicas.first
    admission = first.gateway.starter._admission
    reachable = admission._scripts
    assert (await first.client.post("/v1/chat/completions", json={**HELLO, "model": "none"})).status_code == 404
    admission._scripts = SettlementScripts(RespConnection("redis://127.0.0.1:1"))
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(replicas.ask(0)) for _ in range(10)]
        submits = [await replicas.scheduler.submit() for _ in range(4)]
        await eventually(lambda: sum(task.done() for task in asked) == 6)
        assert {task.result().status_code for task in asked if task.done()} == {503}
        for submit in submits:
            await replicas.serve(submit, tokens=2)
    assert sum(task.result().status_code == 200 for task in asked) == 4
    events = [await first.usage(submit.rid) for submit in submits]
    assert {event.outcome for event in events} == {Outcome.FINISHED}
    money = await first.redis.hgetall(keys.budget(first.org.id, "key", first.key.id))
    assert int(money[b"spent"]) == sum(event.cost for event in events) > 0
    assert int(money.get(b"reserved", 0)) == 0
    admission._scripts = reachable
    async with asyncio.TaskGroup() as tasks:
        asked_again = tasks.create_task(replicas.ask(0))
        await replicas.serve(await replicas.scheduler.submit(), tokens=2)
    assert asked_again.result().status_code == 200
    assert int(asked_again.result().headers["x-ratelimit-remaining-requests"]) <= 96


async def test_a_hard_budget_of_billing_binds_every_replica_and_survives_the_loss_of_redis_data(replicas: Replicas):
    first = replicas.first
    engine, org = first.gateway.engine, first.org.id
    budgets = Budgets(engine, first.redis)
    assert (await replicas.ask(1, model="none")).status_code == 404  # the key is in memory, without a budget
    async with engine.begin() as db:
        await set_budget(db, Budget(organisation=org, scope="org", scope_id=org, amount=20_000))
    await announce(first.redis, Change(kind="budget", id=org, state=""))
    await eventually(lambda: not any(rig.gateway.auth._cache for rig in replicas.rigs))
    assert (await replicas.ask(1, max_tokens=40)).status_code == 503  # Redis does not know it yet
    await budgets.sync(now=dt.datetime.now(dt.UTC), tenant=org)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(replicas.ask(1, max_tokens=40))
        submit = await replicas.scheduler.submit()
        prompt = len(submit.prompt) // 4
        over = await replicas.ask(2, max_tokens=40)  # 16,000 of 20,000 are reserved
        assert (over.status_code, over.json()["error"]["code"]) == (429, "insufficient_quota")
        await replicas.serve(submit, tokens=30)
    assert asked.result().status_code == 200
    await first.usage(submit.rid)
    await first.redis.delete(keys.budget(org, "org", org))
    assert (await replicas.ask(0, max_tokens=16)).status_code == 503
    await budgets.sync(now=dt.datetime.now(dt.UTC), tenant=org)
    spent = int(await first.redis.hget(keys.budget(org, "org", org), "spent"))
    assert spent == prompt * 100 + 30 * 400
    assert (await replicas.ask(0, max_tokens=40)).status_code == 429


async def test_a_revoked_key_is_refused_by_every_replica_at_once(replicas: Replicas):
    for i in range(3):
        assert (await replicas.ask(i, model="none")).status_code == 404  # all have it in memory
    first = replicas.first
    await publish_key_state(first.redis, await first.tenants.revoke(first.org.id, first.key.id))
    assert [(await replicas.ask(i)).status_code for i in range(3)] == [401, 401, 401]
    assert await first.redis.xlen(keys.inbox(POOL)) == 0


async def _none(count: Any) -> bool:
    return not await count


async def test_uncached_tokens_that_were_found_cached_are_free_again_while_the_answer_runs(rig: Rig):
    """The whole prompt is reserved as uncached; the rest is free as soon as the prefill side tells."""
    await rig.tenant(limits=Limits(uncached_prompt_tokens_per_minute=60_000, prompt_tokens_per_minute=60_000))

    async def taken(meter: str) -> float:
        bucket = keys.rate_bucket(rig.org.id, "key", rig.key.id, meter)
        level, at = await rig.redis.hmget(bucket, "level", "at")
        return 60_000 - int(level) / 1000 if at else 0.0

    async with asyncio.TaskGroup() as tasks:
        text = "one and two " * 100
        body = {**HELLO, "messages": [{"role": "user", "content": text}], "max_tokens": 9}
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", content=json.dumps(body)))
        submit = await rig.scheduler.submit()
        prompt = len(submit.prompt) // 4
        assert prompt > 200
        before = await taken("uncached_prompt_tokens")
        assert before == await taken("prompt_tokens") == prompt
        await rig.scheduler.placed(submit, prefill=rig.prefill, decode=rig.decode)
        computing = await rig.prefill.open(submit.rid, Phase.PREFILL)
        answering = await rig.decode.open(submit.rid, Phase.DECODE)
        await computing.finish(FinishReason.LENGTH, prompt=prompt, cached=prompt - 10)
        await eventually(lambda: rig.redis.exists(keys.reservation_cached(rig.org.id, submit.rid)))
        assert await taken("uncached_prompt_tokens") <= 10
        assert await taken("prompt_tokens") == prompt
        assert not asked.done()
        await answering.tokens("x")
        await answering.finish(FinishReason.STOP, prompt=prompt, completion=1)
    assert asked.result().status_code == 200
    event = await rig.usage(submit.rid)
    assert (event.tokens.prefill_computed, event.tokens.prefill_cached) == (10, prompt - 10)
    assert await taken("uncached_prompt_tokens") <= 10  # the settlement gives nothing back twice
    assert not await rig.redis.exists(keys.reservation_cached(rig.org.id, submit.rid))
