"""What the catalogue says about one pool, as the scheduler needs it."""

from collections.abc import Mapping

import msgspec

from contracts.catalog import Catalog
from contracts.lifecycle import HandOff
from contracts.perf import LatencyModel
from contracts.scaling import Scaling
from contracts.slo import SloTarget
from scheduler.policy.turns import BATCH_TIER


class PoolProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Targets and costs of a pool. Several models may share one; the first in the file speaks for the pool."""

    model: str = ""
    hand_off: HandOff = HandOff.DIRECT
    target: SloTarget = SloTarget()
    """Of tier `default`: what the ratio is steered by."""
    tiers: Mapping[str, SloTarget] = {}
    latency: LatencyModel | None = None
    """Costs of a worker, as the operator states them; None = what workers register, else learned."""
    resident_tpot_ms: float | None = None
    """The strictest TPOT target of any interactive tier: what a newcomer must not spoil."""

    scaling: Scaling | None = None
    """How many workers it may have; None = those it was started with."""
    neighbours: tuple[str, ...] = ()
    """Other pools that scale, and so may share machines with it."""

    @classmethod
    def of(cls, catalog: Catalog, pool: str) -> "PoolProfile":
        """Return the profile of one of the catalogue's pools."""
        names = [name for name in catalog.models if catalog.pool_of(name) == pool]
        first = catalog.models[names[0]]
        tiers = {tier: target for name in reversed(names) for tier, target in catalog.models[name].tiers.items()}
        tpots = [t.tpot_ms for tier, t in tiers.items() if tier != BATCH_TIER and t.tpot_ms is not None]
        return cls(
            model=names[0],
            hand_off=first.hand_off,
            target=first.tiers.get("default", SloTarget()),
            tiers=tiers,
            latency=first.latency,
            scaling=first.scaling,
            neighbours=tuple(p for p in catalog.pools if p != pool and catalog.scaling_of(p) is not None),
            resident_tpot_ms=min(tpots, default=None),
        )
