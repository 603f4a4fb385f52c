"""What must hold after every fault: nothing lost, doubled, wrong or stuck, and everything given back."""

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import asyncpg
import httpx
import msgspec
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError

from benches.chaos.callers import Call
from benches.chaos.plan import POSTGRES
from benches.chaos.site import GATEWAYS, POOL, PROCESSES, SCHEDULERS, WORKERS, Site
from contracts import keys
from contracts.wire import Registration
from tests.e2e.ledger_view import ledger_is_balanced, nothing_is_reserved
from tests.processes import until

SETTLE_S = 30.0
NUM_PAIRS = 4
BUSY = {
    **dict.fromkeys(WORKERS, ("pdgate_worker_running", "pdgate_worker_waiting", "pdgate_worker_kv_used")),
    **dict.fromkeys(GATEWAYS, ("pdgate_streams", "pdgate_settlements_waiting", "pdgate_settlements_journalled")),
    **dict.fromkeys(SCHEDULERS, ("pdgate_inbox_pending",)),
}
"""Gauges that are zero when nothing runs: slots, rooms (a room holds KV memory), streams, settlements, entries."""


class Account(msgspec.Struct, kw_only=True):
    """The findings of one round; every number but those of `told` is a fault of ours when it is not zero."""

    lost: int = 0  # accepted and not answered to the end, without the plan's leave
    refused: int = 0  # not accepted, without the plan's leave
    wrong: int = 0  # read a byte that the engine does not say
    stuck: int = 0  # neither ended nor failed
    uncharged: int = 0  # answered, and no charge
    doubled: int = 0  # charged more than what was answered, or without an answer
    unbalanced: int = 0
    kept: int = 0  # reservations, leases, records, slots, rooms that are still there
    unwell: int = 0  # a worker, pair or gateway that is not ready again
    told: dict[str, int] = {}  # what clients saw, by verdict
    notes: list[str] = []

    @property
    def bad(self) -> int:
        """How much is wrong."""
        return (
            self.lost + self.refused + self.wrong + self.stuck + self.uncharged + self.doubled + self.unbalanced
            + self.kept + self.unwell
        )  # fmt: skip


class Books:
    """Reads what the site's services hold."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._http = httpx.AsyncClient(timeout=3)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def gauges(self, name: str) -> dict[str, float]:
        """Return a process's gauges, summed over labels where there are several. Raises httpx.TransportError."""
        site = self._site
        page = (await self._http.get(f"http://{site.stack.host(name)}:{site.stack.metrics_ports[name]}/metrics")).text
        found: dict[str, float] = {}
        for line in page.splitlines():
            if line.startswith("pdgate_"):
                label, _, value = line.rpartition(" ")
                found[label] = float(value)
                short = label.partition("{")[0]
                found[short] = found.get(short, 0.0) + float(value)
        return found

    async def whole(self) -> list[str]:
        """Return what is not ready: workers and pairs as the leader sees them, gateways as they say."""
        missing = []
        try:
            for name, url in self._site.gateways:
                if (await self._http.get(f"{url}/readyz")).status_code != 200:
                    missing.append(f"{name} is not ready")
            missing += [f"{name} has no lease" for name in WORKERS if not await self._registered(name)]
            views = [await self.gauges(name) for name in SCHEDULERS]
        except (httpx.TransportError, RedisError, OSError) as error:
            return [repr(error)]
        for gauge, wanted, what in (
            ("pdgate_workers", 'state="ready"', len(WORKERS)),
            ("pdgate_worker_pairs", 'state="open"', NUM_PAIRS),
        ):
            sums = [sum(v for k, v in view.items() if k.startswith(f"{gauge}{{") and wanted in k) for view in views]
            if max(sums) < what:
                missing.append(f"{gauge} {wanted}: {max(sums):g} of {what}")
        return missing

    async def _registered(self, name: str) -> bool:
        """Return whether the lease of a worker is that of the process which runs."""
        raw = await self._site.redis.get(keys.worker_lease(POOL, name))
        if raw is None:
            return False
        return msgspec.msgpack.decode(raw, type=Registration).pid == self._site.stack.processes[name].pid

    async def wait_whole(self, timeout_s: float) -> list[str]:
        """Wait until all is ready, and return what is not by then."""
        missing: list[str] = []

        async def is_whole() -> bool:
            nonlocal missing
            missing = await self.whole()
            return not missing

        with suppress(TimeoutError):
            await until(is_whole, timeout_s, every_s=0.1)
        return missing

    async def busy(self) -> list[str]:
        """Return what is not back to zero while nobody calls."""
        found = []
        for name, gauges in BUSY.items():
            try:
                seen = await self.gauges(name)
            except httpx.TransportError as error:
                found.append(f"{name}: {error!r}")
                continue
            found += [f"{name} {gauge}={seen[gauge]:g}" for gauge in gauges if seen.get(gauge, 0.0) > 0]
        try:
            if not await nothing_is_reserved(self._site.redis):
                found += [f"in Redis: {name}" for name in await kept_keys(self._site.redis)] or ["something in Redis"]
        except (RedisError, OSError):
            await self._site.reconnect()
            found.append("Redis does not answer")
        return found

    async def settled(self, known: Collection[str] = ()) -> list[str]:
        """Wait until everything was given back but what is known not to be, and return what was not."""
        busy: list[str] = []

        async def is_idle() -> bool:
            nonlocal busy
            busy = [what for what in await self.busy() if what not in known]
            return not busy

        with suppress(TimeoutError):
            await until(is_idle, SETTLE_S, every_s=0.1)
        return busy

    async def database(self) -> asyncpg.Connection:
        """Return the connection, made again when the server was lost."""
        site = self._site
        if not site.database.is_closed():
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await site.database.fetchval("SELECT 1")
                return site.database
        site.database.terminate()
        site.database = await asyncpg.connect(site.servers.running[POSTGRES].url)
        return site.database

    async def charged(self, calls: Sequence[Call], account: Account, *, free_at: Sequence[str]) -> None:
        """Compare what clients read with what billing wrote. `free_at`: gateways whose answers may be free."""
        database = await self.database()
        done = {call.rid: call for call in calls if call.verdict == "done"}
        cut = {call.rid for call in calls if call.verdict == "cut"}

        async def all_written() -> bool:
            return bool(await database.fetchval(_NUM, list(done)) == len(done))

        with suppress(TimeoutError):
            await until(all_written, SETTLE_S, every_s=0.1)
        since_s = min((call.began_s for call in calls), default=time.time()) - 600
        rows = {str(row["rid"]): row for row in await database.fetch(_ROWS, since_s)}
        for rid, call in done.items():
            row = rows.get(rid)
            prompt = call.usage.get("prompt_tokens", 0)
            if row is not None and not row["cost"] and call.gateway in free_at:
                account.told["free"] = account.told.get("free", 0) + 1
            elif row is None or not row["cost"]:
                account.uncharged += 1
                account.notes.append(f"{rid} is not charged")
            elif (row["outcome"], row["decode"], row["prompt"]) != ("finished", len_of(call), prompt):
                account.doubled += 1
                account.notes.append(f"{rid} read {len_of(call)} of {prompt}, charged {dict(row)}")
        for call in calls:
            row = rows.get(call.rid)
            if call.rid in done or row is None or not row["cost"]:
                continue
            if call.rid in cut and row["outcome"] == "finished":
                continue  # the gateway had all of it and died before its client had
            account.doubled += 1
            account.notes.append(f"{call.rid} is {call.verdict} and costs {row['cost']} ({row['outcome']})")
        twice = await database.fetchval(_TWICE)
        account.doubled += twice
        if not await ledger_is_balanced(database) or await database.fetchval(_DRIFT):
            account.unbalanced += 1


async def kept_keys(redis: Redis) -> list[str]:
    """Return the names of reservations, leases, entries and records that are still there."""
    found = []
    async for key in redis.scan_iter(match="pdgate:*"):
        name = key.decode()
        held = (":res:" in name or ":inflight:" in name or (":running:" in name and await redis.zcard(key))
                or (name.endswith(":inbox") and await redis.xlen(key)) or (name.endswith(":open") and await redis.zcard(key)))  # fmt: skip # noqa: E501
        if held:
            found.append(name)
    return found


def len_of(call: Call) -> int:
    """Return the tokens that a client was told of."""
    return call.usage.get("completion_tokens", 0)


_NUM = "SELECT count(*) FROM billing.request WHERE request_id = ANY($1::uuid[])"
_ROWS = """
SELECT r.request_id AS rid, r.outcome, r.cost,
       (SELECT coalesce(sum(tokens), 0) FROM billing.usage_record u
         WHERE u.request_id = r.request_id AND meter = 'decode')::int AS decode,
       (SELECT coalesce(sum(tokens), 0) FROM billing.usage_record u
         WHERE u.request_id = r.request_id AND meter IN ('prefill_computed', 'prefill_cached'))::int AS prompt
  FROM billing.request r WHERE r.at > to_timestamp($1)
"""
_TWICE = """
SELECT count(*) FROM (SELECT request_id, meter FROM billing.usage_record GROUP BY 1, 2 HAVING count(*) > 1) AS t
"""
_DRIFT = """
SELECT (SELECT coalesce(sum(cost), 0) FROM billing.request)
    <> (SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry
          JOIN billing.account ON id = account_id WHERE kind = 'receivable')
"""


def memory_mb(site: Site, names: Iterable[str] = PROCESSES) -> dict[str, tuple[int, float]]:
    """Return pid and resident memory of each process that is there, MB."""
    found = {}
    for name in names:
        pid = site.stack.processes[name].pid
        with suppress(psutil.NoSuchProcess):
            found[name] = (pid, psutil.Process(pid).memory_info().rss / 2**20)
    return found
