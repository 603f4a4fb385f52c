"""A helm that looks often, targets that are tight, and counters by their labels."""

import msgspec
from rig_gateway import POOL

from contracts.slo import SloTarget
from observability.metrics import Instruments
from scheduler.helm import HelmSettings
from scheduler.policy import decisions
from scheduler.policy.ladder import LadderLimits
from scheduler.policy.sight import RatioLimits
from scheduler.profile import PoolProfile

QUICK = HelmSettings(
    look_s=0.05,
    point_s=0.2,
    ratio=RatioLimits(period_s=0.1, min_samples=4, cooldown_s=1.0, cooldown_from_decode_s=1.0),
    ladder=LadderLimits(up_s=0.2, down_s=0.3),
)
TIGHT = SloTarget(ttft_ms=500, tpot_ms=50)
PROFILE = PoolProfile(model="tiny", target=TIGHT, tiers={"default": TIGHT}, resident_tpot_ms=50)
replace = msgspec.structs.replace


def counted(instruments: Instruments, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in instruments.registry.collect()
        for sample in family.samples
        if sample.name == f"pdgate_{name}_total"
    }


def logged(folder) -> list[decisions.Record]:
    with (folder / f"{POOL}.jsonl").open("rb") as lines:
        return list(decisions.decode(lines))
