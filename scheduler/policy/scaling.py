"""How many workers of which role a pool should have: one tick. Pure; production and simulator run this.

1. Nobody there and nobody asking: asleep. Somebody asks: one unified worker, which alone can serve; what else the
   floors and the demand ask for follows once it serves.
2. No traffic for the idle time: everybody goes, both roles together; who can sleep sleeps first, where that is asked
   for. Whoever is wanted is woken, if one of the role sleeps, rather than started.
3. Awake, the demand is the moments of the requests seen times the rate forecast for when a new worker would serve.
   What the closed forms say of it is corrected by how much of it has come true so far (policy.foresight). Too few is
   who cannot serve the goal in time in the best mix of as many workers: so a change of roles that would do is left to
   the ratio controller. Then the cheapest mix halfway from goal to `aim` is started, all of it at once.
4. While nothing is lacking, workers of an old launch are replaced (policy.renewal); nobody else goes meanwhile.
5. Fewer are tried when the largest need of lately is smaller, nothing was started meanwhile, and what remains, worker
   by worker, still reaches `aim`; while load falls, half the way to it. Lately is four starts' length back, and where
   load has not changed for longer, half of the time since it did (policy.plateau).

Steps say why. Bounds, budget and room cut starts short, and say so.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.demand import Demand
from scheduler.policy.headcount import (
    Bounds,
    Lull,
    Member,
    ScaleLimits,
    ScalePlan,
    ScaleSight,
    ScaleState,
    Step,
    Stop,
    WhyScale,
    serves,
    split_of,
)
from scheduler.policy.mixes import Mix, Mixes, Valued
from scheduler.policy.plateau import plateau_of
from scheduler.policy.queueing import Corrections, Fleet, Split
from scheduler.policy.renewal import Turn, renew
from scheduler.policy.starts import most_workers, starts_of

_ONE_UNIFIED = Split(unified=1)
_PRESSING = 1.1
"""Correction of a load above which more workers are for the sake of misses rather than of arrivals."""
_ORDER = (Role.UNIFIED, Role.DECODE, Role.PREFILL)
_NOT_NOW = frozenset({WhyScale.ASLEEP, WhyScale.IDLE, WhyScale.BOOTING, WhyScale.UNCONFIRMED, WhyScale.OVER_MAX})
"""Answers beside which no old worker is replaced."""


def scale(
    state: ScaleState,
    sight: ScaleSight,
    bounds: Bounds,
    fleet: Fleet,
    limits: ScaleLimits,
    now_s: float,
    *,
    valued: Valued = Mixes,
) -> tuple[ScaleState, ScalePlan]:
    """Return the steps of this tick, and why. `valued` makes what tells how well mixes serve a demand.

    Under `shadow` the answer is the same; the caller does not act on it and must keep the state of before.
    """
    split = sight.split
    learned = state.foresight.after(sight.outcomes, now_s, limits.foresight)
    plateau = plateau_of(state.plateau, sight.rate, now_s, band=limits.plateau_band)
    state = msgspec.structs.replace(state, foresight=learned, plateau=plateau)
    rescued = [m for m in sight.members if m.reclaimed and m.ours]
    steps: list[Step] = [Stop(worker_id=m.worker_id, role=m.role, why=WhyScale.RECLAIMED) for m in rescued]
    steps += [Stop(worker_id=m.worker_id, role=m.role, why=WhyScale.RENEW) for m in sight.asleep if m.old]
    verdict = _at_rest(sight, bounds, limits) or _awake(state, sight, bounds, fleet, limits, now_s, valued)
    state = msgspec.structs.replace(
        state,
        needs=verdict.needs,
        under_ticks=verdict.under_ticks,
        flip_since_s=verdict.flip_since_s,
        foresight=msgspec.structs.replace(learned, last=verdict.foreseen),
    )
    why, calm = verdict.why, not verdict.wanted and verdict.why not in _NOT_NOW
    turn = renew(sight, state.renewing, bounds.floor) if calm else None
    renewing = turn.renewing if turn is not None else None if calm else state.renewing
    if turn is not None:
        more, why = _renewed(turn, sight, bounds)
        steps += more
    elif verdict.leaves:
        steps += [_leave(m, why, sight, bounds) for m in verdict.leaves]
        state = msgspec.structs.replace(state, last_down_s=now_s)
    elif verdict.wanted:
        starts, cut = starts_of(verdict.wanted, why, sight, bounds)
        steps += starts
        why = cut or why
        if starts:
            state = msgspec.structs.replace(state, last_up_s=now_s, under_ticks=0)
            for start in starts if renewing is not None else ():
                renewing = _with(renewing, start.role)
    if why is WhyScale.RENEWAL_HELD and all(m.old for m in sight.members if m.ours):
        renewing = None  # nothing has begun: roles may change
    state = msgspec.structs.replace(state, renewing=renewing)
    return state, ScalePlan(
        steps=tuple(steps),
        why=WhyScale.RECLAIMED if rescued and not verdict.wanted else why,
        split=split,
        desired=verdict.desired,
        in_time=verdict.in_time,
        rate_rps=sight.rate.now_rps if sight.rate is not None else None,
        ahead_rps=sight.rate.ahead_rps if sight.rate is not None else None,
        belief=learned.belief(limits.foresight),
        attained=learned.attained,
        constant_s=plateau.age_s(now_s) if plateau is not None else None,
    )


def _leave(member: Member, why: WhyScale, sight: ScaleSight, bounds: Bounds) -> Step:
    """Return how a worker goes: to sleep, if it can and is awake, or for good."""
    lulls = why is WhyScale.IDLE and member.sleeps and not member.old and sight.quiet_s < bounds.idle_s + bounds.sleep_s
    kind = Lull if lulls else Stop
    return kind(worker_id=member.worker_id, role=member.role, why=why)


def _renewed(turn: Turn, sight: ScaleSight, bounds: Bounds) -> tuple[list[Step], WhyScale]:
    """Return the steps of a renewal's turn: all starts that are needed together, or none of them."""
    starts, _ = starts_of(turn.starts, turn.why, sight, bounds)
    if turn.starts and len(starts) == len(turn.starts):
        return starts, turn.why
    leaves = turn.leaves or (turn.instead if turn.starts else ())
    held = turn.why is WhyScale.RENEW and not leaves
    why = WhyScale.RENEWAL_HELD if held else turn.why
    return [Stop(worker_id=m.worker_id, role=m.role, why=why) for m in leaves], why


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    why: WhyScale
    desired: Split
    wanted: tuple[Role, ...] = ()
    """Roles to start, the most urgent first."""
    leaves: tuple[Member, ...] = ()
    needs: tuple[tuple[float, int], ...] = ()
    under_ticks: int = 0
    flip_since_s: float | None = None
    in_time: float | None = None
    foreseen: float | None = None
    """Share (0 to 1) of misses that the closed forms, uncorrected, expect of those who serve at the present rate."""


def _short_of(split: Split, floor: Split) -> tuple[Role, ...]:
    """Return the roles that a pool that is awake lacks: by the floors, or because nobody could serve."""
    lacking = _lacking(split, floor)
    if lacking or serves(split):
        return lacking
    return (Role.UNIFIED,)


# -- asleep, waking, falling asleep ----------------------------------------------------------------------------


def _at_rest(sight: ScaleSight, bounds: Bounds, limits: ScaleLimits) -> _Verdict | None:
    """Return what holds at and near zero; None = the pool is awake."""
    split = sight.split
    asked = bool(sight.num_waiting or sight.num_running)
    if bounds.to_zero and not asked:
        if split.total == 0 and sight.quiet_s > 0:
            slept = sight.quiet_s >= bounds.idle_s + bounds.sleep_s
            leaves = tuple(m for m in sight.asleep if slept and not m.old)
            return _Verdict(why=WhyScale.IDLE if leaves else WhyScale.ASLEEP, desired=Split(), leaves=leaves)
        if sight.quiet_s >= bounds.idle_s:
            ours = tuple(m for m in sight.members if m.ours and not m.reclaimed)
            kept = split_of([m for m in sight.members if not m.ours])
            return _Verdict(why=WhyScale.IDLE if ours else WhyScale.STEADY, desired=kept, leaves=ours)
    ready = split_of([m for m in sight.members if m.ready])
    if not serves(ready):
        if serves(split):
            # One first. Only a crowd that is known well enough to be sized up gets more before it serves.
            return None if sight.num_waiting >= limits.min_arrivals else _Verdict(why=WhyScale.BOOTING, desired=split)
        asleep = split_of([m for m in sight.asleep if not m.old])
        if asleep.prefill and asleep.decode and not asleep.unified:
            return _Verdict(
                why=WhyScale.COLD_START, desired=Split(prefill=1, decode=1), wanted=(Role.PREFILL, Role.DECODE)
            )
        return _Verdict(why=WhyScale.COLD_START, desired=_ONE_UNIFIED, wanted=(Role.UNIFIED,))
    return None


# -- awake -------------------------------------------------------------------------------------------------------


def _awake(
    state: ScaleState,
    sight: ScaleSight,
    bounds: Bounds,
    fleet: Fleet,
    limits: ScaleLimits,
    now_s: float,
    valued: Valued,
) -> _Verdict:
    split, floor = sight.split, bounds.floor
    lacking = _short_of(split, floor)
    if lacking:
        return _Verdict(why=WhyScale.FLOOR, desired=_union(split, floor), wanted=lacking, needs=state.needs)
    most = most_workers(sight, bounds)
    up, down = _demands(sight, limits)
    if up is None or down is None:
        return _quiet(state, sight, bounds, limits, now_s)
    corrections = _bounded(sight.corrections, limits)
    goal, belief = limits.goal_of(state.foresight), state.foresight.belief(limits.foresight)
    mixes = valued(up, fleet, corrections, floor, belief)
    here = mixes.best(split.total)
    as_it_is = mixes.in_time(split)
    waited = state.flip_since_s if as_it_is < goal <= here.in_time else None
    if waited is not None and now_s - waited >= limits.flip_patience_s:
        here = Mix(split=split, in_time=as_it_is)  # nobody changed roles: they will not
    if here.in_time < goal:
        verdict = _too_few(state, sight, mixes, here, floor, limits, most, now_s, aim=(goal + limits.aim) / 2)
    else:
        careful = valued(down, fleet, corrections, floor, belief)
        falls = sight.rate is not None and sight.rate.ahead_rps < sight.rate.now_rps
        aim = (
            (goal + limits.aim) / 2 if falls else limits.aim
        )  # where less is coming, what remains gets better by itself
        need = careful.fewest(aim, of=split.total, at_least=max(1, floor.total))
        verdict = _enough(state, sight, careful, need, bounds, limits, now_s, goal=goal, aim=aim, in_time=here.in_time)
        if as_it_is < goal:
            since_s = state.flip_since_s if state.flip_since_s is not None else now_s
            why = WhyScale.FLIPPING if sight.flipping else WhyScale.FLIP_CHEAPER
            verdict = msgspec.structs.replace(verdict, why=why, leaves=(), flip_since_s=since_s)
    return msgspec.structs.replace(verdict, foreseen=_foreseen(sight, fleet, corrections, valued))


def _foreseen(sight: ScaleSight, fleet: Fleet, corrections: Corrections, valued: Valued) -> float | None:
    """Return the share (0 to 1) of misses that the closed forms expect of those who serve, as of now."""
    if sight.demand is None or sight.rate is None:
        return None
    serving = split_of([m for m in sight.members if m.ready])
    demand = _at_rate(sight.demand, sight.rate.now_rps)
    return 1 - valued(demand, fleet, corrections, Split(), None).in_time(serving)


def _too_few(
    state: ScaleState,
    sight: ScaleSight,
    mixes: Mixes,
    here: Mix,
    floor: Split,
    limits: ScaleLimits,
    most: int,
    now_s: float,
    *,
    aim: float,
) -> _Verdict:
    """Answer that as many as there are cannot do it in any mix."""
    split, ticks = sight.split, state.under_ticks + 1
    target = mixes.cheapest(aim, at_most=max(most, floor.total), at_least=max(floor.total, split.total + 1))
    why = WhyScale.FORECAST
    if sight.corrections.backlog_rps > 0.1 * (sight.rate.highest_rps if sight.rate is not None else 0.0):
        why = WhyScale.BACKLOG
    elif max(sight.corrections.prefill, sight.corrections.decode) > _PRESSING:
        why = WhyScale.SLO_PRESSURE
    verdict = _Verdict(
        why=why,
        desired=target.split,
        needs=_remember(
            _lately(state.needs, now_s - _window_s(state, sight, limits, now_s)), target.split.total, now_s
        ),
        under_ticks=ticks,
        flip_since_s=state.flip_since_s,
        in_time=here.in_time,
    )
    if split.total >= most:
        return msgspec.structs.replace(verdict, why=WhyScale.AT_MAX)
    by_chance = why is WhyScale.FORECAST and _constant_s(state, now_s) >= limits.down_s(sight.boot_s)
    if by_chance:  # as far as is known: load is the same, and nobody waits
        unconfirmed = ticks < limits.same_ticks
    else:
        unconfirmed = ticks < limits.confirm_ticks and here.in_time >= limits.sure_goal
    if unconfirmed:
        return msgspec.structs.replace(verdict, why=WhyScale.UNCONFIRMED)
    more = target.split.total - split.total
    wanted = (_lacking(split, target.split) + (Role.UNIFIED,) * more)[:more]
    return msgspec.structs.replace(verdict, wanted=wanted, under_ticks=0)


def _enough(
    state: ScaleState,
    sight: ScaleSight,
    mixes: Mixes,
    need: Mix,
    bounds: Bounds,
    limits: ScaleLimits,
    now_s: float,
    *,
    goal: float,
    aim: float,
    in_time: float,
) -> _Verdict:
    """Answer that there are enough, perhaps too many."""
    split, floor = sight.split, bounds.floor
    over = split.total > bounds.max_workers
    window_s = limits.down_s(sight.boot_s) if over else _window_s(state, sight, limits, now_s)
    needs = _remember(_lately(state.needs, now_s - window_s), need.split.total, now_s)
    verdict = _Verdict(why=WhyScale.STEADY, desired=need.split, needs=needs, in_time=in_time)
    booting = any(not m.ready for m in sight.members)
    surplus = split.total - max(total for _, total in needs)
    if surplus < 1:
        passing = split.total > max(total for _, total in _lately(needs, now_s - limits.down_s(sight.boot_s)))
        return msgspec.structs.replace(verdict, why=WhyScale.CONSTANT_LOAD) if passing else verdict
    if sight.flipping or booting:
        return msgspec.structs.replace(verdict, why=WhyScale.FLIPPING if sight.flipping else WhyScale.BOOTING)
    if not over and not _down_is_due(state, limits, window_s, now_s):
        return msgspec.structs.replace(verdict, why=WhyScale.COOLING_DOWN)
    leaves = _who_leaves(sight, mixes, floor, limits, goal=goal, aim=aim, at_most=surplus)
    if not leaves:
        return msgspec.structs.replace(verdict, why=WhyScale.N_MINUS_1)
    return msgspec.structs.replace(verdict, why=WhyScale.OVER_MAX if over else WhyScale.OVERSIZED, leaves=leaves)


def _quiet(state: ScaleState, sight: ScaleSight, bounds: Bounds, limits: ScaleLimits, now_s: float) -> _Verdict:
    """Answer for a pool with too little traffic to say more than that the floors are enough."""
    split, floor = sight.split, bounds.floor
    window_s = limits.down_s(sight.boot_s)
    needs = _remember(_lately(state.needs, now_s - window_s), max(1, floor.total), now_s)
    verdict = _Verdict(why=WhyScale.NO_DATA, desired=floor if serves(floor) else _ONE_UNIFIED, needs=needs)
    if split.total <= max(total for _, total in needs) or sight.flipping:
        return verdict
    if not _down_is_due(state, limits, window_s, now_s) or any(not m.ready for m in sight.members):
        return msgspec.structs.replace(verdict, why=WhyScale.COOLING_DOWN)
    for member in _by_cost(sight.members):
        left = _without(split, member.role)
        if not _short_of(left, floor):
            return msgspec.structs.replace(verdict, why=WhyScale.OVERSIZED, leaves=(member,))
    return verdict


def _window_s(state: ScaleState, sight: ScaleSight, limits: ScaleLimits, now_s: float) -> float:
    """Return for how long a need holds after it was seen."""
    return limits.window_s(sight.boot_s, _constant_s(state, now_s))


def _constant_s(state: ScaleState, now_s: float) -> float:
    return state.plateau.age_s(now_s) if state.plateau is not None else 0.0


def _down_is_due(state: ScaleState, limits: ScaleLimits, window_s: float, now_s: float) -> bool:
    up_long_ago = state.last_up_s is None or now_s - state.last_up_s >= window_s
    return up_long_ago and (state.last_down_s is None or now_s - state.last_down_s >= limits.down_gap_s)


def _who_leaves(
    sight: ScaleSight, mixes: Mixes, floor: Split, limits: ScaleLimits, *, goal: float, aim: float, at_most: int
) -> tuple[Member, ...]:
    """Return whom to stop: one after the other, as long as those who remain reach the aim."""
    split = sight.split
    leaves: list[Member] = []
    candidates = _by_cost(sight.members)
    most = min(at_most, max(1, int(limits.down_share * split.total)))
    while len(leaves) < most:
        best: tuple[float, Member] | None = None
        for role in _ORDER:
            member = next((m for m in candidates if m.role is role and m not in leaves), None)
            left = _without(split, role)
            if member is None or _short_of(left, floor):
                continue
            in_time = mixes.in_time(left)
            # The ratio controller may still better what is left, but it must not have to save it.
            good = in_time >= goal and mixes.best(left.total).in_time >= aim
            if good and (best is None or in_time > best[0]):
                best = in_time, member
        if best is None:
            break
        leaves.append(best[1])
        split = _without(split, best[1].role)
    return tuple(leaves)


def _by_cost(members: Sequence[Member]) -> Sequence[Member]:
    """Return who may be stopped, those first whose going costs least."""
    ours = [m for m in members if m.ours and m.ready and not m.reclaimed]
    zones = Counter(m.zone for m in ours)  # the smaller zone first: pairs stay together
    return sorted(ours, key=lambda m: (round(m.drain_s), zones[m.zone], not m.spot, m.worker_id))


# -- demand ------------------------------------------------------------------------------------------------------


def _demands(sight: ScaleSight, limits: ScaleLimits) -> tuple[Demand | None, Demand | None]:
    """Return what must be served, and what might have to be before fewer are thought enough; None = unknown."""
    demand, rate = sight.demand, sight.rate
    if demand is None or rate is None or demand.rate_rps <= 0 or not demand.prefill_ms_quantiles:
        return None, None
    if rate.now_rps * rate.span_s < limits.min_arrivals and sight.num_waiting < limits.min_arrivals:
        return None, None
    careful_rps = rate.ahead_rps + limits.doubt * rate.error_rps  # who goes will not be there then either
    return _at_rate(demand, rate.highest_rps), _at_rate(demand, careful_rps)


def _at_rate(demand: Demand, rate_rps: float) -> Demand:
    """Return the same requests at another rate. The seconds that were seen say nothing of it."""
    return msgspec.structs.replace(demand, rate_rps=rate_rps, course=())


def _bounded(corrections: Corrections, limits: ScaleLimits) -> Corrections:
    low, high = limits.pressure_bounds
    return msgspec.structs.replace(
        corrections,
        prefill=min(max(corrections.prefill, low), high),
        decode=min(max(corrections.decode, low), high),
    )


# -- counting ----------------------------------------------------------------------------------------------------


def _lacking(split: Split, floor: Split) -> tuple[Role, ...]:
    """Return the roles that a split lacks to reach another, the ones lacking most first."""
    gaps = {role: getattr(floor, role) - getattr(split, role) for role in _ORDER}
    found: list[Role] = []
    while (role := max(gaps, key=lambda r: gaps[r])) and gaps[role] > 0:
        found.append(role)
        gaps[role] -= 1
    return tuple(found)


def _union(one: Split, other: Split) -> Split:
    return Split(
        prefill=max(one.prefill, other.prefill),
        decode=max(one.decode, other.decode),
        unified=max(one.unified, other.unified),
    )


def _with(split: Split | None, role: Role) -> Split:
    split = split or Split()
    return msgspec.structs.replace(split, **{role.value: getattr(split, role) + 1})


def _without(split: Split, role: Role) -> Split:
    return msgspec.structs.replace(split, **{role.value: getattr(split, role) - 1})


def _remember(needs: tuple[tuple[float, int], ...], total: int, now_s: float) -> tuple[tuple[float, int], ...]:
    """Return the needs with one more; those before it that were no larger say nothing any more."""
    kept = [need for need in needs if need[1] > total]
    return (*kept, (now_s, total))


def _lately(needs: tuple[tuple[float, int], ...], since_s: float) -> tuple[tuple[float, int], ...]:
    return tuple(need for need in needs if need[0] >= since_s)
