"""What the autoscaler sees, remembers and is bounded by: values only."""

import enum
from collections.abc import Mapping, Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.arrivals import RateForecast
from scheduler.policy.demand import Demand
from scheduler.policy.foresight import Belief, Foresight, ForesightLimits, Outcomes
from scheduler.policy.plateau import Plateau
from scheduler.policy.queueing import Corrections, Split


class WhyScale(enum.StrEnum):
    """The reason of a tick's answer, and of each of its steps. A metric label and a log field."""

    # steps
    COLD_START = "cold_start"  # the first worker, for those who wait
    FLOOR = "floor"  # too few by the operator's floors; after a cold start the pair follows by this
    FORECAST = "forecast"  # what arrives, now or when a new worker would serve, is too much
    BACKLOG = "backlog"  # what waits is too much
    SLO_PRESSURE = "slo_pressure"  # blamed misses say that workers do less than believed
    IDLE = "idle"  # no traffic for the idle time: nobody is left
    OVERSIZED = "oversized"
    OVER_MAX = "over_max"  # the operator's bounds have come down
    RECLAIMED = "reclaimed"  # spot capacity is about to be taken away
    EVICTED = "evicted"  # another model needs the room more
    RENEW = "renew"  # a worker of an old launch goes, or one comes in its place
    # none
    STEADY = "steady"
    ASLEEP = "asleep"
    NO_DATA = "no_data"
    BOOTING = "booting"  # what was started is on its way
    UNCONFIRMED = "unconfirmed"
    FLIP_CHEAPER = "flip_cheaper"  # other roles at the same number would do
    FLIPPING = "flipping"
    COOLING_DOWN = "cooling_down"  # fewer would do, not for long enough
    CONSTANT_LOAD = "constant_load"  # fewer would do, but under the very same load as many were needed not long ago
    N_MINUS_1 = "n_minus_1"  # one worker less would miss targets
    RENEWING = "renewing"  # what replaces old workers is on its way
    RENEWAL_HELD = "renewal_held"  # new workers do not stay up, or find no room beside the old ones
    AT_MAX = "at_max"
    BUDGET = "budget"
    NO_ROOM = "no_room"


class ScaleLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the autoscaler."""

    period_s: float = 5.0
    target: float = 0.95
    """Share (0 to 1) of requests that shall be in time over hours, of those that an idle machine would serve."""
    spare: float = 0.01
    """What must have been attained beyond the target lately for `goal` to hold; with less of it, more is asked for."""
    goal: float = 0.85
    """Share in time below which there are too few workers, while the target is met: a pool that is left at this for
    a while is far above it for the rest of the time."""
    aim: float = 0.95
    """Share that a mix must promise to remain after one worker has gone; and the goal of a pool that has missed the
    target. Where load rises or falls, the middle between goal and aim will do, to be chosen or to remain."""
    sure_goal: float = 0.8
    """Share below which no second tick need confirm it."""
    foresight: ForesightLimits = ForesightLimits()
    confirm_ticks: int = 3
    same_ticks: int = 5
    """Ticks that must say so, however surely, where load has not changed beyond chance and nobody waits: by chance a
    burst of half a minute looks like a rise."""
    doubt: float = 0.5
    """Standard errors of the rate that are added before fewer workers are thought enough."""
    fresh_s: float = 30.0
    """A worker that serves helps nobody at once: looked ahead beyond its start."""
    down_boots: float = 4.0
    down_bounds_s: tuple[float, float] = (120.0, 900.0)
    """For how long fewer must have been enough, and nothing been started, before one goes: so many times what a start
    takes, since that long it would be missed if it had to come back."""
    plateau_band: float = 0.1
    """Share by which a rate may change and still be the same."""
    plateau_share: float = 0.5
    plateau_most_s: float = 7200.0
    """Under the same load fewer must have been enough for that share of the time since it is the same, if that is
    longer; for so long at most."""
    down_gap_s: float = 240.0
    down_share: float = 0.34
    """Most of the workers, as a share of them, that go in one step; one may always."""
    flip_patience_s: float = 120.0
    """How long a change of roles that would do is waited for."""
    clear_s: float = 60.0
    """Time in which a backlog should be gone."""
    stranded_s: float = 120.0
    """For how long a worker may wait for a place in a zone without room while another zone has some."""
    min_arrivals: int = 20
    """Arrivals to judge by; with fewer one worker is enough."""
    pressure_bounds: tuple[float, float] = (1.0, 1.6)
    """Of the feedback's corrections, as far as the number of workers follows them."""

    def down_s(self, boot_s: float) -> float:
        """Return for how long fewer must have been enough, where a start takes `boot_s`."""
        low, high = self.down_bounds_s
        return min(max(self.down_boots * boot_s, low), high)

    def window_s(self, boot_s: float, plateau_s: float) -> float:
        """Return the same where load has not changed for `plateau_s`."""
        return max(self.down_s(boot_s), min(self.plateau_share * plateau_s, self.plateau_most_s))

    def goal_of(self, foresight: Foresight) -> float:
        """Return the share in time below which there are too few workers, by what was attained lately."""
        owed = (self.target + self.spare - foresight.attained) / self.spare
        return self.goal + min(max(owed, 0.0), 1.0) * (self.aim - self.goal)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows one pool."""

    max_workers: int
    to_zero: bool = True
    idle_s: float = 300.0
    floor: Split = Split()
    """While the pool is awake."""
    budget_per_hour: int | None = None
    """Nano-units; None = no limit."""
    spot_share: float = 0.0
    sleep_s: float = 0.0
    """For how long workers that can sleep do so after the idle time, before they are stopped; 0 = they are at once."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves or is on its way."""

    worker_id: str
    role: Role
    ready: bool
    ours: bool = True
    """Started by the fleet: it may be stopped."""
    zone: str = ""
    spot: bool = False
    drain_s: float = 0.0
    reclaimed: bool = False
    """Its spot capacity will be taken away: it counts no more."""
    sleeps: bool = False
    """It can be sent to sleep, or does sleep."""
    old: bool = False
    """It is to be replaced: its launch has changed, or an operator has asked for new ones since it was started."""


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet has to offer."""

    free: Mapping[str, int]
    """Further workers by zone."""
    free_spot: Mapping[str, int] = {}
    per_hour: int = 0
    """Nano-units."""
    spot_per_hour: int | None = None


class ScaleSight(msgspec.Struct, frozen=True, kw_only=True):
    """What the autoscaler sees at a tick. Of workers that leave it sees their number alone."""

    members: Sequence[Member]
    ground: Ground
    demand: Demand | None
    """Per request what it asks for; its rate is the forecast's. None = costs or requests are not known."""
    rate: RateForecast | None
    corrections: Corrections = Corrections()
    asleep: Sequence[Member] = ()
    """Who could be woken. They are no members: they serve nobody, and are on the way to nobody."""
    num_waiting: int = 0
    num_running: int = 0
    quiet_s: float = 0.0
    """Since the last arrival, or the last moment with work."""
    boot_s: float = 60.0
    """From asking for a worker until it serves, as measured."""
    flipping: bool = False
    """A worker changes its role."""
    failing: bool = False
    """Workers that were started do not stay up."""
    num_leaving: int = 0
    """Workers that were asked to stop and still hold their place."""
    outcomes: Outcomes = Outcomes()
    """Since the last tick."""

    @property
    def split(self) -> Split:
        """All who serve or will."""
        return split_of(self.members)


class ScaleState(msgspec.Struct, frozen=True, kw_only=True):
    """What the autoscaler remembers."""

    under_ticks: int = 0
    """Ticks in a row with too few."""
    needs: tuple[tuple[float, int], ...] = ()
    """Numbers of workers that were needed lately, (when, how many): each later one smaller than those before it."""
    plateau: Plateau | None = None
    """The rate that load has, if any, and since when."""
    flip_since_s: float | None = None
    """Since when other roles at the same number would do."""
    last_up_s: float | None = None
    last_down_s: float | None = None
    foresight: Foresight = Foresight()
    renewing: Split | None = None
    """The workers that shall be there when all old ones have been replaced; None = none is being replaced."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """One more worker."""

    role: Role
    why: WhyScale
    zone: str = ""
    spot: bool = False


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """One worker less."""

    worker_id: str
    role: Role
    why: WhyScale


class Lull(msgspec.Struct, frozen=True, kw_only=True, tag="lull"):
    """One worker goes to sleep."""

    worker_id: str
    role: Role
    why: WhyScale


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """One worker that sleeps serves again."""

    worker_id: str
    role: Role
    why: WhyScale


Step = Start | Stop | Lull | Wake


class ScalePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A tick's answer."""

    steps: tuple[Step, ...]
    why: WhyScale
    split: Split
    """Who serves or is on the way."""
    desired: Split
    """The mix that the demand asks for."""
    in_time: float | None = None
    """Share (0 to 1) of requests that the present number would serve in time, in its best mix."""
    rate_rps: float | None = None
    ahead_rps: float | None = None
    belief: Belief = Belief()
    """What was made of foreseen misses."""
    attained: float | None = None
    """Share (0 to 1) of the requests of lately that met their targets."""
    constant_s: float | None = None
    """For how long load has been the same."""


def split_of(members: Sequence[Member]) -> Split:
    """Return how many there are of each role."""
    counts = dict.fromkeys(Role, 0)
    for member in members:
        if not member.reclaimed:
            counts[member.role] += 1
    return Split(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], unified=counts[Role.UNIFIED])


def serves(split: Split) -> bool:
    """Whether requests can be served at all."""
    return bool(split.unified or (split.prefill and split.decode))
