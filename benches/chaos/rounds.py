"""One round: load, a fault in its midst, and what is left of both."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime

import asyncpg
import msgspec
from redis.exceptions import RedisError

from benches.chaos.actions import ACTIONS, prepare
from benches.chaos.books import Account, Books
from benches.chaos.callers import Call, Callers, Prompts, Stalls
from benches.chaos.plan import Fault
from benches.chaos.site import PROCESSES, Site

RATE = 10.0  # calls a second
BEFORE_S = 0.6
AFTER_S = 0.8  # of load after the fault's end
WHOLE_S = 45.0
VOID_S = 0.8  # a standstill of the relays to Valkey: leases are renewed each second, leaders lose theirs after 1.5 s
MOST_VOID = 2
NOTICED = frozenset({
    "worker_suspect", "worker_dead", "worker_detached", "pair_in_doubt", "attempt_lost", "continues", "retrying",
    "link_over_budget", "worker_gone", "stalled", "leading", "worker_changed_life", "gateway_detached",
})  # fmt: skip
_INFO = frozenset({"debug", "info"})


class Round(msgspec.Struct, kw_only=True):
    """What one fault did."""

    fault: str
    calls: int = 0
    detected_s: float | None = None  # first line of another process's log that has to do with it
    recovered_s: float = 0.0  # last trouble of any client, from the fault on; of an outage, from its end on
    whole_s: float = 0.0  # until every worker, pair and gateway was ready again, from the fault's end
    account: Account = msgspec.field(default_factory=Account)
    death: bool = False
    void: int = 0  # times that it had to be done again, since the machine stood still
    slowest: str = ""  # the call whose trouble was the last to end


class Logs:
    """Reads what processes wrote since the last look."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._offsets: dict[str, int] = {}

    def skip(self) -> None:
        """Let what is there be old."""
        for name in PROCESSES:
            self._offsets[name] = (self._site.folder / f"{name}.log").stat().st_size

    def detected_s(self, since_s: float, victims: Sequence[str]) -> float | None:
        """Return when any process but the victims wrote of trouble; None = none did."""
        times = [at_s for name in PROCESSES if name not in victims for at_s in self._troubles(name) if at_s >= since_s]
        return min(times) - since_s if times else None

    def _troubles(self, name: str) -> list[float]:
        times = []
        with (self._site.folder / f"{name}.log").open("rb") as file:
            file.seek(self._offsets.get(name, 0))
            for line in file:
                with suppress(msgspec.DecodeError, KeyError, ValueError):
                    event = msgspec.json.decode(line, type=dict[str, object])
                    if event["level"] not in _INFO or event["event"] in NOTICED:
                        times.append(datetime.fromisoformat(str(event["timestamp"])).timestamp())
        return times


class Rounds:
    """Does one fault after the other to a site."""

    def __init__(self, site: Site, prompts: Prompts, stalls: Stalls) -> None:
        self.site = site
        self.books = Books(site)
        self._prompts = prompts
        self._stalls = stalls
        self._logs = Logs(site)
        self._kept: set[str] = set()

    async def run(self, fault: Fault | None) -> Round:
        """Do a fault under load; None = nothing happens, which must show nothing.

        Harm in a round in which the machine let this process, through which all goes, stand still for longer than any
        timer here allows shows nothing: it is void, and the fault is done again.
        """
        for num_void in range(MOST_VOID + 1):
            since_s = time.time()
            result = await self._run(fault)
            result.void = num_void
            if not result.account.bad or self._stalls.longest(since_s) < VOID_S:
                break
        return result

    async def _run(self, fault: Fault | None) -> Round:
        site = self.site
        result = Round(fault=fault.name if fault else "nothing", death=fault is not None and fault.death)
        await prepare(site, fault)
        await self.books.wait_whole(WHOLE_S)
        names = [await site.resolve(name) for name in fault.on] if fault is not None else []
        callers = Callers(site.gateways, site.stack.api_key, self._prompts, rate=RATE)
        self._logs.skip()
        began_s = ended_s = 0.0
        missing: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(callers.run())
            try:
                await asyncio.sleep(BEFORE_S)
                began_s = time.time()
                if fault is not None:
                    try:
                        async with ACTIONS[fault.do](site, fault, names):
                            await asyncio.sleep(fault.hold_s)
                    except (OSError, RedisError, asyncpg.PostgresError) as error:  # TimeoutError is an OSError
                        missing.append(f"the fault or its end did not come about: {error!r}")
                ended_s = time.time()
                missing += await self.books.wait_whole(WHOLE_S)
                result.whole_s = time.time() - ended_s
                await asyncio.sleep(AFTER_S)
            finally:
                callers.stop()
        result.calls = len(callers.calls)
        account = result.account
        account.notes += [f"not ready: {what}" for what in missing]
        account.unwell = len(missing)
        await self._judge(callers.calls, fault, names, account)
        if fault is not None:
            result.detected_s = self._logs.detected_s(began_s, names)
            from_s = ended_s if fault.outage else began_s
            troubles = [
                (t, call) for call in callers.calls if (t := call.disturbed_until_s(began_s, self._stalls)) is not None
            ]
            last_s, last = max(troubles, key=lambda one: one[0], default=(from_s, None))
            result.recovered_s = max(0.0, last_s - from_s)
            if last is not None:
                result.slowest = f"{last.rid} at {last.gateway}, begun {last.began_s - began_s:+.2f} s: {last.verdict}"
        return result

    async def _judge(self, calls: Sequence[Call], fault: Fault | None, names: Sequence[str], account: Account) -> None:
        told: dict[str, int] = {}
        for call in calls:
            told[call.verdict] = told.get(call.verdict, 0) + 1
            account.wrong += call.wrong
            lost = (call.verdict == "failed" and not (fault and fault.fails)) or (
                call.verdict == "cut" and not (fault and fault.cuts and (call.gateway in names or "all" in names))
            )
            refused = call.verdict == "refused" and not (fault and fault.refuses)
            account.lost += lost
            account.refused += refused
            account.stuck += call.verdict == "stuck"
            if call.wrong or lost or refused or call.verdict == "stuck":
                note = f"{call.rid} {call.verdict} {call.status} at {call.gateway} after {len(call.text)} characters"
                account.notes.append(f"{note}: {call.error}")
        account.told = told
        busy = [what for what in await self.books.settled(self._kept) if what not in self._kept]
        self._kept |= set(busy)  # told once, of the fault that left it
        account.kept = len(busy)
        account.notes += [f"kept: {what}" for what in busy]
        await self.books.charged(calls, account, free_at=names if fault and fault.frees else ())


@asynccontextmanager
async def rounds_of(site: Site, *, seed: int) -> AsyncIterator[Rounds]:
    """Wait for the site and give rounds on it, with its service manager at work."""
    prompts = Prompts(site.folder / "models" / "tiny" / "tokenizer.json", seed=seed)
    stalls = Stalls()
    rounds = Rounds(site, prompts, stalls)
    try:
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(site.supervise()), tasks.create_task(stalls.run())]
            missing = await rounds.books.wait_whole(90)
            if missing:
                raise RuntimeError(f"the site does not come up: {missing}")
            try:
                yield rounds
            finally:
                for loop in loops:
                    loop.cancel()
    finally:
        await rounds.books.close()
