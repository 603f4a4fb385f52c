"""The loads that every system gets, and what is read off them.

1. *Saturation*: 256 streams of 256 tokens on a 5 ms clock (32 of 32 for a system under 800 tokens/s), more than any
   of them passes on two cores: tokens/s with client and worker on the same machine.
2. *Loaded*: as many streams on the 5 ms clock as make 70 % of the system's own saturation, 800 tokens each: CPU per
   token, the request's share included.
3. *Common*: 64 streams on a 20 ms clock, 200 tokens each, the same for all (left out where that is more than 70 %).
4. *Requests*: one token each, 16 at once for the capacity, then paced at 70 % of it: CPU per request. The client
   acknowledges at once here, for else a server that waits for it (Nagle) is idle for 40 ms of each request.
5. *First byte*: one token, one at a time, through the system and straight to the worker; with the client's
   acknowledgements delayed as the kernel does, and at once (TCP_QUICKACK).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from benches import load
from benches.cpu import snapshot
from benches.peers.systems import Running

SHARE = 0.7
CLOCK_MS, COMMON_MS = 5.0, 20.0
MANY, MANY_TOKENS = 256, 256
FEW, FEW_TOKENS = 32, 32  # saturate a system under SLOW_TOKENS_PER_S as well, sooner
COMMON, AT_ONCE = 64, 16
SLOW_TOKENS_PER_S, SLOW_PER_S = 800, 50
LOADED_S, COMMON_S = 4.0, 4.0
ONE_BY_ONE, ONE_BY_ONE_SLOW = 120, 30
DEADLINE_S = 120.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU of one load, microseconds per unit, and how many units per second there were."""

    system_us: float
    by_process_us: dict[str, float]
    worker_us: float
    client_us: float
    per_s: float
    connections: int


class FirstByte(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds to the first token, one entry per request."""

    through_ms: list[float]
    straight_ms: list[float]  # to the worker over its own protocol


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """All loads once."""

    saturated: Cost
    loaded: Cost
    common: Cost | None
    requests_saturated: Cost
    requests_loaded: Cost
    first_byte: dict[str, FirstByte]  # "delayed ack", "quick ack"


async def play(running: Running) -> Round:
    """Play every load once."""
    async with running.tick(CLOCK_MS) as at:
        streams, tokens = await _pilot(at)
        saturated = await _streams(at, streams, tokens)
        count = max(1, int(SHARE * saturated.per_s / (1000 / CLOCK_MS)))
        loaded = await _streams(at, count, int(LOADED_S * 1000 / CLOCK_MS))
    common = None
    if SHARE * saturated.per_s >= COMMON * 1000 / COMMON_MS:
        async with running.tick(COMMON_MS) as at:
            common = await _streams(at, COMMON, int(COMMON_S * 1000 / COMMON_MS))
    async with running.tick(1.0) as at:
        await _one_token(at, AT_ONCE, 2)  # the first ones open connections, and workers have just come
        few = await _cost(at, lambda: _one_token(at, AT_ONCE, 8))
        each = max(3, int(few.per_s * 3 / AT_ONCE))
        requests = await _cost(at, lambda: _one_token(at, AT_ONCE, each))
        rate = SHARE * requests.per_s
        paced = await _cost(at, lambda: _paced(at, rate, max(10, int(rate * 3))))
        count = ONE_BY_ONE if requests.per_s > SLOW_PER_S else ONE_BY_ONE_SLOW
        first_byte = {
            name: await _first_byte(at, count, quick_ack=quick)
            for name, quick in (("delayed ack", False), ("quick ack", True))
        }
    return Round(
        saturated=saturated,
        loaded=loaded,
        common=common,
        requests_saturated=requests,
        requests_loaded=paced,
        first_byte=first_byte,
    )


async def _pilot(running: Running) -> tuple[int, int]:
    """Check that answers are whole, and return how many streams, of how many tokens, saturate in some seconds."""
    whole = await load.run("127.0.0.1", running.port, [[running.request(20)]], keep_body=True, deadline_s=DEADLINE_S)
    said = bytes(whole[0].body)
    told = said.count(b'"content":"') - said.count(b'"content":""')
    if whole[0].status != 200 or told != 20:
        raise RuntimeError(f"asked 20 tokens, got {told} (status {whole[0].status}): {said[-400:]!r}")
    probe = await _streams(running, FEW, 16)
    return (MANY, MANY_TOKENS) if probe.per_s > SLOW_TOKENS_PER_S else (FEW, FEW_TOKENS)


async def _streams(running: Running, count: int, tokens: int) -> Cost:
    async def run() -> int:
        streams = await load.run("127.0.0.1", running.port, [[running.request(tokens)]] * count, deadline_s=DEADLINE_S)
        return tokens * _whole(streams)

    return msgspec.structs.replace(await _cost(running, run), connections=count)


async def _one_token(running: Running, connections: int, each: int) -> int:
    work = [[running.request(1)] * each] * connections
    return _whole(await load.run("127.0.0.1", running.port, work, deadline_s=DEADLINE_S, quick_ack=True))


async def _paced(running: Running, rate_rps: float, count: int) -> int:
    """Send requests of one token at even times over a few connections; one that is late goes at once."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    numbers = iter(range(count))
    seen: list[load.Stream] = []

    async def connection() -> None:
        async with load.connected("127.0.0.1", running.port, quick_ack=True) as client:
            for number in numbers:
                await asyncio.sleep(max(0.0, start_s + number / rate_rps - loop.time()))
                seen.append(await client.send(running.request(1), DEADLINE_S))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2 * AT_ONCE):
            tasks.create_task(connection())
    return _whole(seen)


async def _first_byte(running: Running, count: int, *, quick_ack: bool) -> FirstByte:
    work = [[running.request(1)] * count]
    streams = await load.run("127.0.0.1", running.port, work, deadline_s=DEADLINE_S, quick_ack=quick_ack)
    _whole(streams)
    return FirstByte(
        through_ms=[stream.ttfb_ms for stream in streams],
        straight_ms=await running.straight_ms(count=count, quick_ack=quick_ack),
    )


def _whole(streams: list[load.Stream]) -> int:
    failed = [stream for stream in streams if stream.status != 200 or not stream.first_byte]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(streams)} failed: {failed[0].status} {bytes(failed[0].body)[-300:]!r}"
        )
    return len(streams)


async def _cost(running: Running, run: Callable[[], Awaitable[int]]) -> Cost:
    pids = {**running.pids, **running.worker_pids}
    before, own, start_s = snapshot(pids), time.process_time_ns(), time.perf_counter()
    units = await run()
    wall_s = time.perf_counter() - start_s
    client_ns = time.process_time_ns() - own
    after = snapshot(pids)
    us = {name: (after[name] - before[name]) / units / 1000 for name in pids}
    return Cost(
        system_us=sum(us[name] for name in running.pids),
        by_process_us={name: round(value, 2) for name, value in us.items()},
        worker_us=sum(us[name] for name in running.worker_pids),
        client_us=client_ns / units / 1000,
        per_s=units / wall_s,
        connections=0,
    )
