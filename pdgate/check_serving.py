"""What `pdgate doctor` asks about workers and targets: do they fit together, and can the targets be met at all?"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from redis.asyncio import Redis

from contracts import keys
from contracts.catalog import Catalog
from contracts.lifecycle import Role, WorkerState
from contracts.roofline import Accelerator, Deployment, weight_bytes_per_gpu
from contracts.series import PERIOD_S, Point, read_series
from contracts.slo import SloTarget
from contracts.wire import Registration
from pdgate.findings import Check, judged
from pdgate.plan.models import KnownModel
from pdgate.worker_commands import alive_workers
from scheduler.policy.pairing import mismatch
from scheduler.worker import compatibility_of

_OLD_POINT_S: Final = 10 * PERIOD_S
_HEADROOM: Final = 1.2
"""A target closer than this to what an idle machine takes leaves no room for a second request."""


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as it is at the moment."""

    pool: str
    workers: Sequence[Registration]
    led: bool
    """Whether a scheduler holds the leader's lease."""
    point: Point | None
    """The leader's last one, if it is fresh."""

    def count(self, *roles: Role) -> int:
        """Return how many workers are ready in one of the roles."""
        return sum(1 for w in self.workers if w.role in roles and w.state is WorkerState.READY)

    @property
    def served(self) -> bool:
        """Whether there is a complete path: a unified worker, or one of each other role."""
        return bool(self.count(Role.UNIFIED)) or bool(self.count(Role.PREFILL) and self.count(Role.DECODE))


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The least an idle machine takes, ms, and where that is known from."""

    first_ms: float
    step_ms: float
    source: str


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of the pool runs on, as the operator says."""

    model: KnownModel
    gpu: Accelerator
    gpus: int

    @property
    def weight_read_ms(self) -> float:
        """The time to read the weights once from the memory of each GPU: the least that a step can take."""
        use = Deployment(gpus=self.gpus, weights=self.model.weights)
        return weight_bytes_per_gpu(self.model.shape, use) / self.gpu.bytes_per_s * 1000


async def pool_facts(redis: Redis, catalog: Catalog) -> Sequence[PoolFacts]:
    """Read every pool of the catalogue. Raises RedisError."""
    facts = []
    for pool in catalog.pools:
        points = await read_series(redis, pool, count=1)
        fresh = points[-1] if points and time.time() - points[-1].at_unix_ms / 1000 < _OLD_POINT_S else None
        workers = await alive_workers(redis, pool)
        led = bool(await redis.exists(keys.leader(pool)))
        facts.append(PoolFacts(pool=pool, workers=workers, led=led, point=fresh))
    return facts


def worker_checks(facts: PoolFacts, catalog: Catalog) -> Sequence[Check]:
    """Judge the workers of a pool. A pool without any is judged as a whole only."""
    workers, pool = facts.workers, facts.pool
    roles = ", ".join(f"{facts.count(role)} {role.value}" for role in Role)
    checks = [
        judged(
            f"workers of {pool}",
            f"ready: {roles}; " + ("a scheduler leads" if facts.led else "no scheduler leads"),
            [
                (not facts.served, "start a prefill and a decode worker, or a unified one: nothing can be served"),
                (not facts.led, "start a scheduler (SCHEDULER_POOLS, where it is set, must name this pool)"),
            ],
        )
    ]
    if not workers:
        return checks
    others = sorted(w.worker_id for w in workers if w.catalog_revision != catalog.revision)
    revisions = Counter((w.model_path, w.model_revision) for w in workers)
    engines = Counter(w.engine for w in workers)
    checks.append(
        judged(
            f"versions of {pool}",
            f"{len(revisions)} model revision(s), engines {', '.join(sorted(engines))}, "
            f"{len(workers) - len(others)} of {len(workers)} with catalogue {catalog.revision}",
            [
                (bool(others), f"restart {', '.join(others)}: they were started with another catalogue"),
                (len(revisions) > 1, f"give all workers one model: {_by_revision(workers)}"),
                (len(engines) > 1, "run one engine in a pool: the timed one makes no real text"),
            ],
        )
    )
    if facts.count(Role.PREFILL) and facts.count(Role.DECODE):
        checks.append(_pairs(facts))
    return checks


def _pairs(facts: PoolFacts) -> Check:
    prefills = [w for w in facts.workers if w.role is Role.PREFILL]
    decodes = [w for w in facts.workers if w.role is Role.DECODE]
    misfits = sorted(
        f"{prefill.worker_id} and {decode.worker_id} differ in {why}"
        for prefill in prefills
        for decode in decodes
        if (why := mismatch(compatibility_of(prefill), compatibility_of(decode))) is not None
    )
    probed = dict(facts.point.pairs) if facts.point is not None else {}
    said = ", ".join(f"{number} {state}" for state, number in sorted(probed.items())) or "no scheduler has told"
    return judged(
        f"pairs of {facts.pool}",
        f"{len(prefills) * len(decodes) - len(misfits)} of {len(prefills) * len(decodes)} fit; probes: {said}",
        [
            (bool(misfits), "; ".join(misfits)),
            (
                bool(probed.get("failed")),
                "a KV cache does not get through: see `pair_probe_failed` in the scheduler's log",
            ),
        ],
    )


def _by_revision(workers: Sequence[Registration]) -> str:
    return ", ".join(sorted(f"{w.worker_id} has {w.model_path}@{w.model_revision[:8]}" for w in workers))


def floor_of(facts: PoolFacts, catalog: Catalog, model: str) -> Floor | None:
    """Return what an idle worker takes: as its pool measures it, as the catalogue states, or as workers register."""
    point = facts.point
    if point is not None and point.idle_step_ms is not None and point.idle_first_ms is not None:
        return Floor(first_ms=point.idle_first_ms, step_ms=point.idle_step_ms, source="as the scheduler measures")
    own = next((w.latency for w in facts.workers if w.latency is not None), None)
    stated = catalog.models[model].latency
    latency = stated or own
    if latency is None:
        return None
    step_ms = latency.decode.step_ms(1, 1)
    hand_off_ms = 0.0 if facts.count(Role.UNIFIED) else latency.transfer.ms(1)
    return Floor(
        first_ms=latency.prefill.ms(1) + hand_off_ms + step_ms,
        step_ms=step_ms,
        source="as the catalogue states" if stated else "as the workers register",
    )


def target_checks(facts: PoolFacts, catalog: Catalog, *, hardware: Hardware | None = None) -> Sequence[Check]:
    """Judge the targets of every tier of the models that a pool serves."""
    checks = []
    for name, model in catalog.models.items():
        if catalog.pool_of(name) == facts.pool:
            floor = floor_of(facts, catalog, name)
            checks += [_target(f"{name}, tier {tier}", wanted, floor, hardware) for tier, wanted in model.tiers.items()]
    return checks


def _target(name: str, wanted: SloTarget, floor: Floor | None, hardware: Hardware | None) -> Check:
    said = ", ".join(
        f"{word} {value:g} ms"
        for word, value in (("TTFT", wanted.ttft_ms), ("TPOT", wanted.tpot_ms))
        if value is not None
    )
    found, wrong = [f"targets {said or 'none'}"], []
    if floor is None:
        found.append("what an idle worker takes is not known yet: send it some requests")
    else:
        found.append(f"idle: first token {floor.first_ms:.1f} ms, step {floor.step_ms:.1f} ms, {floor.source}")
        wrong.append(_against("TTFT", wanted.ttft_ms, floor.first_ms, "what a first token takes on an idle worker"))
        wrong.append(_against("TPOT", wanted.tpot_ms, floor.step_ms, "what one decode step takes on an idle worker"))
    if hardware is not None:
        gpus = f"{hardware.gpus}x{hardware.gpu.name}"
        found.append(f"{gpus} reads the weights in {hardware.weight_read_ms:.1f} ms")
        wrong.append(_against("TPOT", wanted.tpot_ms, hardware.weight_read_ms, f"{gpus}'s weight-read time"))
    return judged(f"targets of {name}", "; ".join(found), wrong)


def _against(word: str, target_ms: float | None, least_ms: float, what: str) -> tuple[bool, str]:
    """Return whether a target asks too much, and what to do about it."""
    if target_ms is None or target_ms >= least_ms * _HEADROOM:
        return False, ""
    if target_ms >= least_ms:
        return (
            True,
            f"{word} {target_ms:g} ms is within {_HEADROOM - 1:.0%} of {what}, {least_ms:.1f} ms: {_raise(word)}",
        )
    return True, f"{word} {target_ms:g} ms is below {what}, {least_ms:.1f} ms: {_raise(word)}"


def _raise(word: str) -> str:
    better = "more GPUs per worker, fewer bytes per weight" if word == "TPOT" else "a faster worker, a shorter prompt"
    return f"raise the target in models.toml, or use {better}"
