"""`pdgate doctor --tuning`: twelve lines, five musts for the first week and seven shoulds.

Every line is checked by code against the running stack; none is advice in general.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from redis.asyncio import Redis

from contracts import keys
from contracts.catalog import Catalog
from contracts.identity import NUM_SHARDS
from contracts.lifecycle import Role
from gateway.exposure import Exposure
from pdgate.check_services import RedisFacts
from pdgate.check_serving import PoolFacts, target_checks

_MUST: Final = "must"
_SHOULD: Final = "should"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the checklist."""

    weight: Literal["must", "should"]
    rule: str
    ok: bool
    found: str
    change: str = ""


async def buried(redis: Redis) -> int:
    """Return how many usage events billing could not post."""
    async with redis.pipeline(transaction=False) as pipeline:
        for shard in range(NUM_SHARDS):
            pipeline.xlen(keys.dead_letters(shard))
        lengths: list[Any] = await pipeline.execute()
    return sum(lengths)


async def gateways(redis: Redis, now_unix_ms: int) -> int:
    """Return how many gateways are alive."""
    return int(await redis.zcount(keys.GATEWAYS, now_unix_ms, "+inf"))


def lines(
    *,
    redis: RedisFacts,
    pools: Sequence[PoolFacts],
    catalog: Catalog,
    exposure: Exposure,
    num_gateways: int,
    num_buried: int,
    decisions: Path | None,
) -> Sequence[Line]:
    """Return the twelve lines, the musts first."""
    return [
        _line(
            _MUST,
            "usage survives a restart of Redis",
            redis.aof and redis.appendfsync != "no",
            f"append-only file {'on' if redis.aof else 'off'}, appendfsync {redis.appendfsync or 'not told'}",
            "set `appendonly yes` and `appendfsync everysec`",
        ),
        _line(
            _MUST,
            "Redis throws nothing away",
            redis.policy == "noeviction",
            f"maxmemory-policy {redis.policy}",
            "set `maxmemory-policy noeviction`",
        ),
        _targets(pools, catalog),
        _spare(pools),
        _line(
            _MUST,
            "every key has a limit",
            not exposure.unlimited,
            f"{len(exposure.unlimited)} of {exposure.keys} live keys without any: one tenant can fill the queue",
            "give its organisation, project or key a limit: `pdgate keys set`",
        ),
        _line(
            _SHOULD,
            "two gateways",
            num_gateways >= 2,
            f"{num_gateways} alive",
            "start another one behind the same address: a restart then cuts no new request",
        ),
        _line(
            _SHOULD,
            "a controller looks after the split",
            bool(pools) and all(pool.point is not None and pool.point.mode != "manual" for pool in pools),
            "; ".join(f"{pool.pool}: {pool.point.mode if pool.point else 'no leader'}" for pool in pools),
            "set SCHEDULER_RATIO_MODE=shadow to see what it would do, then auto",
        ),
        _decided(pools, decisions),
        _line(
            _SHOULD,
            "predictions rest on measurements",
            bool(pools) and all(pool.point is not None and pool.point.idle_step_ms is not None for pool in pools),
            "; ".join(f"{pool.pool}: {_known(pool)}" for pool in pools),
            "state [models.X.latency] in models.toml (`pdgate plan` prints it), or send some requests",
        ),
        _line(
            _SHOULD,
            "no demo organisation",
            not exposure.demos,
            f"demo organisations with a live key: {', '.join(exposure.demos) or 'none'}",
            "start with `--no-demo`, and `pdgate keys revoke` its key",
        ),
        _alike(pools, catalog),
        _line(
            _SHOULD,
            "no usage event is buried",
            not num_buried,
            f"{num_buried} in the dead letters",
            "`pdgate usage dead-letters list` says why, `redrive` posts them again",
        ),
    ]


def _line(weight: Literal["must", "should"], rule: str, ok: bool, found: str, change: str) -> Line:
    return Line(weight=weight, rule=rule, ok=ok, found=found, change="" if ok else change)


def _targets(pools: Sequence[PoolFacts], catalog: Catalog) -> Line:
    checks = [check for pool in pools for check in target_checks(pool, catalog)]
    impossible = [check.change for check in checks if not check.ok]
    return _line(
        _MUST,
        "targets can be met",
        not impossible,
        f"{len(checks) - len(impossible)} of {len(checks)} tiers are above what an idle worker takes",
        "; ".join(impossible),
    )


def _spare(pools: Sequence[PoolFacts]) -> Line:
    single = []
    for pool in pools:
        unified = pool.count(Role.UNIFIED)
        if min(pool.count(Role.PREFILL), pool.count(Role.DECODE)) + unified < 2:
            single.append(pool.pool)
    return _line(
        _MUST,
        "every pool survives the loss of a worker",
        not single,
        f"one loss ends {', '.join(single)}" if single else "two ways through every pool",
        "start a second prefill and decode worker, or a unified one beside the pair",
    )


def _decided(pools: Sequence[PoolFacts], decisions: Path | None) -> Line:
    missing = [pool.pool for pool in pools if decisions is None or not (decisions / f"{pool.pool}.jsonl").exists()]
    return _line(
        _SHOULD,
        "decisions are written down",
        not missing,
        f"no log of {', '.join(missing)} in {decisions or 'SCHEDULER_DECISION_LOG'}" if missing else str(decisions),
        "set SCHEDULER_DECISION_LOG: `pdgate why` and `pdgate replay` read it",
    )


def _known(pool: PoolFacts) -> str:
    step_ms = pool.point.idle_step_ms if pool.point is not None else None
    return "nothing known" if step_ms is None else f"idle step {step_ms:.1f} ms"


def _alike(pools: Sequence[PoolFacts], catalog: Catalog) -> Line:
    others = [w.worker_id for pool in pools for w in pool.workers if w.catalog_revision != catalog.revision]
    failed = sum(pool.point.pairs.get("failed", 0) for pool in pools if pool.point is not None)
    return _line(
        _SHOULD,
        "all workers are of one kind, and every pair is proven",
        not others and not failed,
        f"{len(others)} with another catalogue, {failed} pairs whose probe failed",
        f"restart {', '.join(others) or 'them'}; see `pdgate doctor` for the pairs",
    )
