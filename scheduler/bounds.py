"""What the catalogue says of a pool's workers, as the policy wants it."""

from contracts.scaling import Scaling
from scheduler.policy.headcount import Bounds
from scheduler.policy.queueing import Split


def bounds_of(scaling: Scaling) -> Bounds:
    """Return the policy's form of what the catalogue says."""
    return Bounds(
        max_workers=scaling.max_workers,
        to_zero=scaling.to_zero,
        idle_s=scaling.idle_s,
        floor=Split(prefill=scaling.min_prefill, decode=scaling.min_decode, unified=scaling.min_unified),
        budget_per_hour=scaling.budget_nano,
        spot_share=scaling.spot_share,
        sleep_s=scaling.sleep_s,
    )
