"""What the ratio controller sees, remembers and is bounded by: values only."""

from collections.abc import Sequence

import msgspec

from contracts.lifecycle import HandOff, Role
from scheduler.policy.blame import Blamed
from scheduler.policy.demand import Demand
from scheduler.policy.queueing import Split


class Donor(msgspec.Struct, frozen=True, kw_only=True):
    """A ready worker and what taking it away would cost."""

    worker_id: str
    role: Role
    drain_s: float
    """Until its running work is done."""
    cached_tokens: int = 0
    """Prefix cache that it would lose."""


class RatioLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the controller. `patient` suits the direct hand-off, `agile` the store."""

    period_s: float = 5.0
    """Between decisions, unless something has happened (`ratio.is_early`)."""
    switch_s: float = 5.0
    """A change between prefill and decode, without the drain: graph capture under the direct hand-off."""
    restart_s: float = 60.0
    """A change to or from unified: an engine restart under the direct hand-off."""
    drains: bool = True
    """Whether a worker must be empty to change."""
    cooldown_s: float = 30.0
    cooldown_from_decode_s: float = 60.0
    min_gain: float = 0.015
    """Relative gain in goodput below which nothing moves."""
    clear_gain: float = 0.05
    """Relative gain that needs only `confirm_ticks`; a smaller one needs `patient_ticks`."""
    last_unified_gain: float = 0.03
    """Relative gain for which the last unified worker may go: the pairs back each other up, if less simply."""
    reserve_load: float = 1.5
    """Where no split gains: the load, over the present one, for which room is kept."""
    reserve_gain: float = 0.05
    """Relative gain in goodput under that load for which a worker moves that is not needed where it is."""
    sure_gain: float = 0.05
    """Relative gain from which a move in the same direction as the last need not wait for the cooldown."""
    price_margin: float = 0.3
    confirm_ticks: int = 2
    patient_ticks: int = 12
    """Ticks in a row that must favour a move, by how clear its gain is."""
    sure_error: float = 0.1
    """Relative error (0 to 1) of the work that arrives, up to which the first move of all needs no second tick."""
    hold_s: float = 300.0
    """How long a demand is expected to last before any change was seen."""
    hold_bounds_s: tuple[float, float] = (15.0, 600.0)
    mix_s: float = 1800.0
    """How long demands that take turns faster than workers follow are expected to go on so: what a pool is asked for
    as a whole changes with the hour."""
    detect_s: float = 15.0
    """From a change of demand until it is certain enough to act on."""
    moves_to_follow: float = 4.0
    """Moves that a change of demand usually takes."""
    clear_s: float = 20.0
    """Time in which a backlog should be gone."""
    target_miss: float = 0.025
    """Blamed misses per side that are accepted: half of what a 95 % aim leaves."""
    gain_time_s: float = 60.0
    gain_bounds: tuple[float, float] = (0.7, 1.6)
    gain_half_life_s: float = 300.0
    min_samples: int = 30
    """Arrivals of the current demand before a move, and outcomes before a gain is turned."""
    max_refused_share: float = 0.01
    pinned: Split | None = None
    """The split of mode `manual`."""

    @classmethod
    def of(cls, hand_off: HandOff) -> "RatioLimits":
        """Return the limits that suit a hand-off: patient under `direct`, agile under `store`."""
        if hand_off is HandOff.DIRECT:
            return cls()
        return cls(
            period_s=1.0,
            switch_s=0.001,
            restart_s=0.001,
            drains=False,
            cooldown_s=3.0,
            cooldown_from_decode_s=3.0,
            patient_ticks=60,  # a minute, too: a small gain is doubtful, however little a move costs
            last_unified_gain=0.02,
        )


class RatioState(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller remembers."""

    prefill_gain: float = 1.0
    decode_gain: float = 1.0
    prefill_foreseen: float = 0.0
    decode_foreseen: float = 0.0
    """Misses of either side that the model expects of the split as it is, 0.0 to 1.0."""
    last_tick_s: float | None = None
    last_alarm_s: float | None = None
    """The latest change of demand that a tick has seen."""
    saw_move: bool = False
    """A move was begun by the last tick or was under way at it."""
    last_move_s: float | None = None
    last_from: Role | None = None
    last_to: Role | None = None
    reversals: int = 0
    """Moves in a row that undid the one before; each doubles the cooldown."""
    dissolving: bool = False
    """The last move was one towards a pool without pairs."""
    favoured: tuple[Role, Role] | None = None
    favoured_ticks: int = 0
    favoured_for_reserve: bool = False
    """The ticks ask for room, not for goodput."""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller sees at a tick."""

    split: Split
    """Ready workers. A worker that drains or switches is in no role."""
    moving: bool
    """A drain or switch is under way."""
    donors: Sequence[Donor]
    demand: Demand | None
    """None = nothing measured, which is not the same as no traffic."""
    past: Sequence[Demand] = ()
    """Demands of earlier segments, the latest last."""
    alarms_s: Sequence[float] = ()
    """When the demand changed, on the tick's clock."""
    blamed: Blamed | None = None
    waiting_in_time: int = 0
    """Requests that wait in the scheduler and can still meet their targets."""
