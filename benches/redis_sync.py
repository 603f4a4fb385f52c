"""What syncing Redis' file costs per request: `python -m benches.redis_sync [--folder ON_THE_DISK_IN_QUESTION]`.

Each caller reserves, writes an inbox entry and settles, one after the other, as a request of the gateway does, over
connections that pipeline. `no` and `everysec` answer before the file is synced; `always` answers after, once for all
that came in the same turn of the server's loop. A line per policy and number of callers: milliseconds of the three
calls together, the server's own CPU per request, and requests a second.
"""

import argparse
import asyncio
import tempfile
import time
from asyncio import TaskGroup
from pathlib import Path
from typing import Final

from benches.cpu import cpu_ns
from contracts import keys
from contracts.identity import new_rid
from contracts.rating import Price, Tokens
from contracts.resp import RespConnection
from contracts.settlement import (
    METER_TOKENS,
    Budget,
    Lease,
    Rate,
    Reservation,
    Reserved,
    SettlementScripts,
    actual_usage,
)
from contracts.usage import Outcome, UsageEvent
from contracts.wire import FIELD
from pdgate.services import start_valkey

POLICIES: Final = ("no", "everysec", "always")
CALLERS: Final = (1, 16, 128)
_ORG: Final = "org_sync"
_PRICE: Final = Price(version=1, model="m", prefill_computed=1, prefill_cached=1, decode=1)
_PROMPT: Final = bytes(4 * 512)


async def _request(connection: RespConnection, scripts: SettlementScripts) -> float:
    """Return how long one request's calls took, ms."""
    now_ms = int(time.time() * 1000)
    rid = new_rid(now_ms)
    reservation = Reservation(
        rid=rid,
        member=f"{_ORG}/{rid}",
        now_ms=now_ms,
        deadline_ms=now_ms + 60_000,
        key_id="k",
        key_state="1",
        owner="{}",
        pool="m",
        rates=[Rate(key=keys.rate_bucket(_ORG, "org", _ORG, METER_TOKENS), meter=METER_TOKENS, limit=2**40, amount=1)],
        leases=[Lease(key=keys.concurrency_leases(_ORG, "org", _ORG), limit=2**20)],
        budgets=[Budget(key=keys.budget(_ORG, "org", _ORG), limit=2**50, amount=1)],
    )
    event = UsageEvent(
        rid=rid, org=_ORG, project="p", key_id="k", model="m", pool="m", tier="default", outcome=Outcome.FINISHED,
        tokens=Tokens(prefill_computed=500, decode=100), cost=1, price=_PRICE,
    )  # fmt: skip
    began_s = time.perf_counter()
    if not isinstance(granted := await scripts.reserve(_ORG, reservation), Reserved):
        raise TypeError(f"not reserved: {granted}")
    await connection.call("XADD", keys.inbox("m"), "MAXLEN", "~", 1000, "*", FIELD, _PROMPT)
    await scripts.settle(event, actual_usage(event))
    return (time.perf_counter() - began_s) * 1000


async def measure(url: str, pid: int, *, policy: str, callers: int, seconds: float) -> str:
    """Return one line."""
    connection = RespConnection(url)
    scripts = SettlementScripts(connection)
    await connection.call("CONFIG", "SET", "appendfsync", policy)
    await connection.call("FLUSHALL")
    await connection.call("HSET", keys.key_states(_ORG), "k", "1")
    took_ms: list[float] = []

    async def call_again() -> None:
        while time.perf_counter() < until_s:
            took_ms.append(await _request(connection, scripts))

    began_ns, began_s = cpu_ns(pid), time.perf_counter()
    until_s = began_s + seconds
    async with TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(call_again())
    spent_us, span_s = (cpu_ns(pid) - began_ns) / 1000, time.perf_counter() - began_s
    connection.close()
    took_ms.sort()
    p50, p99 = (took_ms[int(len(took_ms) * share)] for share in (0.5, 0.99))
    return (
        f"{policy:9} {callers:4} callers  p50 {p50:7.2f} ms  p99 {p99:7.2f} ms"
        f"  {spent_us / len(took_ms):6.0f} us CPU a request  {len(took_ms) / span_s:6.0f} requests/s"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the file is; a temporary folder if absent")
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        service = start_valkey(Path(folder) / "valkey")
        try:
            for policy in POLICIES:
                for callers in CALLERS:
                    line = measure(
                        service.url, service.process.pid, policy=policy, callers=callers, seconds=given.seconds
                    )
                    print(asyncio.run(line))
        finally:
            service.stop()


if __name__ == "__main__":
    main()
