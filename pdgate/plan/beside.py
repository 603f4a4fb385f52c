"""Two more ways to serve part of the traffic: short prompts on a small model of one's own, and work without targets."""

from collections.abc import Iterator, Sequence

import msgspec

from contracts.roofline import Accelerator
from contracts.slo import SloTarget
from pdgate.plan.compare import LocalModel, Option
from pdgate.plan.fleet import Setting, workers_of
from pdgate.plan.options import best, load_of
from pdgate.plan.shapes import Kind, Shape, split_shapes, unified_shapes
from pdgate.plan.traffic import Traffics

HYBRID = "hybrid with a small local model"
OFFLINE = "offline batch (no targets)"


def hybrid(
    local: LocalModel, traffics: Traffics, setting: Setting, gpu: Accelerator, count: int, base_rps: float
) -> Option | None:
    """Return the best division of the GPUs between the small model and the asked one; None if there is none.

    Args:
        local: the small model.
        traffics: the workload.
        setting: of the asked model.
        gpu: kind of GPU of both.
        count: GPUs of both together.
        base_rps: what the unified fleet of the asked model serves, for the gain.
    """
    parted = traffics.by_prompt(local.up_to_tokens)
    if parted is None or local.shape.active_weights >= setting.shape.active_weights:
        return None
    short, long, share = parted
    small = msgspec.structs.replace(setting, shape=local.shape, weights=local.weights, moments=short.moments)
    rest = msgspec.structs.replace(setting, moments=long.moments)
    found: tuple[float, Shape, Shape] | None = None
    for gpus in sorted({1, 2, count // 4, count // 2}):
        if not 1 <= gpus < count:
            continue
        ours = best(unified_shapes(workers_of(gpu, gpus, small), gpus), short, small)
        theirs = best(_either(gpu, count - gpus, rest), long, rest)
        if ours is None or theirs is None:
            continue
        rate = min(ours[1] / share, theirs[1] / (1 - share))
        if found is None or rate > found[0]:
            found = rate, ours[0], theirs[0]
    if found is None:
        return None
    rate, ours_shape, theirs_shape = found
    planned = traffics.rate_rps
    attained = (
        share * load_of(ours_shape, planned * share, short, small).attainment
        + (1 - share) * load_of(theirs_shape, planned * (1 - share), long, rest).attainment
    )
    return Option(
        name=HYBRID,
        workers=f"{ours_shape.text()} for {local.shape.name} + {theirs_shape.text()}",
        gpus=ours_shape.gpus + theirs_shape.gpus,
        capacity_rps=rate,
        gain=rate / base_rps - 1 if base_rps > 0 else None,
        attainment=attained,
        price_per_hour=ours_shape.price_per_hour + theirs_shape.price_per_hour,
        note=f"{share:.0%} of the prompts, up to {local.up_to_tokens} tokens, get the small model's answers",
    )


def offline_batch(
    traffics: Traffics, setting: Setting, fleet: Sequence[tuple[int, Accelerator]], base_rps: float, *, worth: float
) -> Option | None:
    """Return what the fleet gets through without targets, and what a split would change; None if nothing fits.

    Args:
        traffics: the workload.
        setting: its targets are set aside.
        fleet: the GPUs.
        base_rps: what the unified fleet serves within the targets, for the gain.
        worth: gain (0.3 = 30 %) from which a split is advised.
    """
    free = traffics.retargeted(SloTarget())
    loose = msgspec.structs.replace(setting, target=SloTarget(), moments=free.moments)
    rows = []
    for count, gpu in fleet:
        workers = workers_of(gpu, count, loose)
        one = best(unified_shapes(workers, count), free, loose)
        two = best(split_shapes(Kind.SPLIT, workers, workers, count), free, loose)
        if one is not None:
            rows.append((one, two))
    if not rows:
        return None
    one, two = max(rows, key=lambda row: row[0][1])
    shape, rate = one
    change = f"a split changes the throughput by {two[1] / rate - 1:+.0%}" if two else "no split fits"
    advice = "a split pays even here" if two is not None and two[1] >= rate * (1 + worth) else "do not split"
    return Option(
        name=OFFLINE,
        workers=shape.text(),
        gpus=shape.gpus,
        capacity_rps=rate,
        gain=rate / base_rps - 1 if base_rps > 0 else None,
        attainment=1.0,
        price_per_hour=shape.price_per_hour,
        note=f"{advice}: {change}",
    )


def _either(gpu: Accelerator, count: int, setting: Setting) -> Iterator[Shape]:
    workers = workers_of(gpu, count, setting)
    yield from unified_shapes(workers, count)
    yield from split_shapes(Kind.SPLIT, workers, workers, count)
