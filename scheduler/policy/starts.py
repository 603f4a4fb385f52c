"""Which workers are started, where, and at what price: what bounds, budget and room leave of a wish. Pure."""

from collections import Counter
from collections.abc import Sequence

from contracts.lifecycle import Role
from scheduler.policy.headcount import Bounds, ScaleSight, Start, Step, Wake, WhyScale

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def most_workers(sight: ScaleSight, bounds: Bounds) -> int:
    """Return how many workers bounds and budget allow; what is there already counts at its price."""
    most = bounds.max_workers
    ground = sight.ground
    if bounds.budget_per_hour is not None and ground.per_hour > 0:
        most = min(most, sight.split.total + max(0, _left_of_budget(sight, bounds)) // ground.per_hour)
    return most


def _left_of_budget(sight: ScaleSight, bounds: Bounds) -> int:
    assert bounds.budget_per_hour is not None
    spot = sight.ground.spot_per_hour
    spent = sum(
        spot if m.spot and spot is not None else sight.ground.per_hour
        for m in (*sight.members, *sight.asleep)
        if not m.reclaimed
    )
    return bounds.budget_per_hour - spent


def starts_of(
    wanted: Sequence[Role], why: WhyScale, sight: ScaleSight, bounds: Bounds
) -> tuple[list[Step], WhyScale | None]:
    """Return the starts that bounds, budget and room leave, and what cut them short. Who sleeps is woken first."""
    ground = sight.ground
    free, free_spot = dict(ground.free), dict(ground.free_spot)
    there = [m for m in sight.members if not m.reclaimed]
    asleep = [m for m in sight.asleep if not m.old]
    total, num_spot = len(there) + len(asleep), sum(m.spot for m in there)
    left = _left_of_budget(sight, bounds) if bounds.budget_per_hour is not None else None
    placed: dict[str, Counter[Role]] = {}
    for member in there:
        placed.setdefault(member.zone, Counter())[member.role] += 1
    starts: list[Step] = []
    for role in wanted:
        sleeper = next((m for m in asleep if m.role is role), None)
        if sleeper is None and asleep and total >= bounds.max_workers:
            sleeper = asleep[0]  # in another role rather than not at all
        if sleeper is not None:
            asleep.remove(sleeper)
            starts.append(Wake(worker_id=sleeper.worker_id, role=sleeper.role, why=why))
            continue
        if total >= bounds.max_workers:
            return starts, WhyScale.AT_MAX
        above = max(0, total + 1 - max(1, bounds.floor.total))
        spot = ground.spot_per_hour is not None and num_spot + 1 <= bounds.spot_share * above
        spot = spot and any(free_spot.values())
        price = ground.spot_per_hour if spot and ground.spot_per_hour is not None else ground.per_hour
        if left is not None and price > left:
            return starts, WhyScale.BUDGET
        zone = _zone_for(role, free_spot if spot else free, placed)
        if zone is None:
            return starts, WhyScale.NO_ROOM
        (free_spot if spot else free)[zone] -= 1
        placed.setdefault(zone, Counter())[role] += 1
        total, num_spot = total + 1, num_spot + spot
        left = left - price if left is not None else None
        starts.append(Start(role=role, zone=zone, spot=spot, why=why))
    return starts, None


def _zone_for(role: Role, free: dict[str, int], placed: dict[str, Counter[Role]]) -> str | None:
    """Return the zone for one more worker of a role: beside its other half; a unified one where the fewest are.

    Then where most room is.
    """
    with_room = [zone for zone, number in free.items() if number > 0]
    if not with_room:
        return None
    other = _OTHER.get(role)

    def lonely(zone: str) -> int:
        """Return how many of the other side there are beyond this one."""
        there = placed.get(zone, Counter())
        return there[other] - there[role] if other is not None else 0

    def company(zone: str) -> int:
        return placed.get(zone, Counter())[other] if other is not None else 0

    def fewest(zone: str) -> int:
        return 0 if other is not None else -sum(placed.get(zone, Counter()).values())

    return max(with_room, key=lambda zone: (lonely(zone), company(zone) > 0, fewest(zone), free[zone], zone))
