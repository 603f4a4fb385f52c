"""What gives way when capacity collapses: rungs from "all is well" to "nothing works". Pure; time is an argument.

1. `climb` looks at the strain each tick and moves at most one rung: up after `up_s` of overload, down after `down_s`
   of calm, so that a recovery has to last. Only the loss of workers skips rungs: without a pair short prompts run on
   unified workers at once, without any worker the pool is at `LOCAL`. Once the workers are back for `back_s` it is
   where it was before: what overload did not ask for need not be climbed down.
2. `passage` says what a rung does with one request. Each rung keeps what those below it do.

Where the pool has no unified workers the two rungs that lean on them are passed over; without a local model `LOCAL`
does what `UNAVAILABLE` does for new requests of the tiers that are still served.
"""

import enum

import msgspec

from scheduler.policy.admission import TIER_RANK


class Rung(enum.IntEnum):
    """How far the pool has degraded; higher is worse. Also the value of its gauge."""

    NORMAL = 0
    SHORT_ON_UNIFIED = 1
    """Short prompts go to unified workers although pairs are meant for them."""
    LONGER_ON_UNIFIED = 2
    """Longer ones too, within a budget of prompt tokens."""
    SHED_BATCH = 3
    SHED_FLEX = 4
    LOCAL = 5
    """Tenants who opted in are served by a small local model; the rest takes what is left."""
    UNAVAILABLE = 6
    """New requests get 503."""

    @property
    def label(self) -> str:
        """Its name in metrics, headers and the decision log."""
        return self.name.lower()


class WhyRung(enum.StrEnum):
    """Why a tick left the ladder where it is, or moved it."""

    STEADY = "steady"
    NO_PAIR = "no_pair"
    NO_WORKER = "no_worker"
    OVERLOAD = "overload"
    LATE_QUEUE = "late_queue"  # the oldest request in time has waited too long
    RECOVERED = "recovered"
    WAITING = "waiting"  # overloaded or calm, not for long enough


class Strain(msgspec.Struct, frozen=True, kw_only=True):
    """How the pool is doing at a tick."""

    pairs: bool
    """A prefill and a decode worker are ready."""
    wants_pairs: bool
    """The pool is meant to have pairs: its controller does not aim at unified workers alone."""
    unified: int
    """Ready unified workers."""
    load: float
    """Prompt work that waits or is being computed, over what the ready workers compute within the TTFT target."""
    oldest_wait_s: float
    """Of the requests that can still be in time; 0 when nobody waits. A short queue can be an old one."""
    wait_limit_s: float
    """What such a request may wait: the TTFT target, or the deadline where there is none."""


class LadderLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the ladder."""

    overload: float = 1.0
    """Load above which a rung up is due."""
    calm: float = 0.6
    """Load below which a rung down is due; between the two nothing changes."""
    calm_wait: float = 0.5
    """Share of the wait limit below which the queue is calm."""
    up_s: float = 3.0
    down_s: float = 15.0
    back_s: float = 3.0
    """How long lost workers must be back."""
    short_tokens: int = 512
    """Uncached prompt tokens of a short prompt."""
    unified_budget_tokens: int = 16_384
    """Prompt tokens queued on unified workers up to which longer prompts may join them; one alone always may."""


class LadderState(msgspec.Struct, frozen=True, kw_only=True):
    """What the ladder remembers."""

    rung: Rung = Rung.NORMAL
    over_since_s: float | None = None
    calm_since_s: float | None = None
    before_loss: Rung | None = None
    """Where it was when workers were lost; None = overload led to the rung."""
    back_since_s: float | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A tick's answer."""

    before: Rung
    after: Rung
    why: WhyRung

    @property
    def moved(self) -> bool:
        """Whether the ladder is on another rung than before."""
        return self.before is not self.after


def climb(state: LadderState, strain: Strain, limits: LadderLimits, now_s: float) -> tuple[LadderState, Step]:
    """Return the ladder's next state and the step that led there."""
    least, lost = _least(strain)
    if state.rung < least:
        before = state.before_loss if state.before_loss is not None else state.rung
        return LadderState(rung=least, before_loss=before), Step(before=state.rung, after=least, why=lost)
    if state.before_loss is not None and state.rung > least:
        return _come_back(state, state.before_loss, strain, limits, now_s)
    return _by_load(state, strain, least, limits, now_s)


def _by_load(
    state: LadderState, strain: Strain, least: Rung, limits: LadderLimits, now_s: float
) -> tuple[LadderState, Step]:
    """Return the step that overload or calm asks for."""
    rung = state.rung
    late = strain.oldest_wait_s > strain.wait_limit_s
    if late or strain.load > limits.overload:
        since_s = state.over_since_s if state.over_since_s is not None else now_s
        up = _next_up(rung, strain)
        if now_s - since_s < limits.up_s or up is rung:
            state = LadderState(rung=rung, over_since_s=since_s, before_loss=state.before_loss)
            return state, Step(before=rung, after=rung, why=WhyRung.WAITING)
        why = WhyRung.LATE_QUEUE if late else WhyRung.OVERLOAD
        return LadderState(rung=up, over_since_s=now_s), Step(before=rung, after=up, why=why)
    calm = strain.load < limits.calm and strain.oldest_wait_s <= limits.calm_wait * strain.wait_limit_s
    if not calm or rung is least:
        return LadderState(rung=rung, before_loss=state.before_loss), Step(before=rung, after=rung, why=WhyRung.STEADY)
    since_s = state.calm_since_s if state.calm_since_s is not None else now_s
    if now_s - since_s < limits.down_s:
        return LadderState(rung=rung, calm_since_s=since_s), Step(before=rung, after=rung, why=WhyRung.WAITING)
    down = max(_next_down(rung, strain), least)
    return LadderState(rung=down, calm_since_s=now_s), Step(before=rung, after=down, why=WhyRung.RECOVERED)


def _come_back(
    state: LadderState, before: Rung, strain: Strain, limits: LadderLimits, now_s: float
) -> tuple[LadderState, Step]:
    """Return to where the ladder was before workers were lost, when they are back for a while."""
    rung, since_s = state.rung, state.back_since_s if state.back_since_s is not None else now_s
    if now_s - since_s < limits.back_s:
        return msgspec.structs.replace(state, back_since_s=since_s), Step(before=rung, after=rung, why=WhyRung.WAITING)
    least, _ = _least(strain)
    after = min(rung, max(before, least))
    left = before if after is least and before < least else None  # some are still missing
    return LadderState(rung=after, before_loss=left), Step(before=rung, after=after, why=WhyRung.RECOVERED)


def _least(strain: Strain) -> tuple[Rung, WhyRung]:
    """Return the lowest rung that the workers allow, and why."""
    if not strain.pairs and not strain.unified:
        return Rung.LOCAL, WhyRung.NO_WORKER
    if strain.wants_pairs and not strain.pairs:
        return Rung.SHORT_ON_UNIFIED, WhyRung.NO_PAIR
    return Rung.NORMAL, WhyRung.STEADY


def _next_up(rung: Rung, strain: Strain) -> Rung:
    if rung is Rung.UNAVAILABLE:
        return rung
    # Only a pool that has both has something to send elsewhere.
    mixed = strain.unified > 0 and strain.wants_pairs
    if rung < Rung.SHED_BATCH and not mixed:
        return Rung.SHED_BATCH
    return Rung(rung + 1)


def _next_down(rung: Rung, strain: Strain) -> Rung:
    mixed = strain.unified > 0 and strain.wants_pairs
    if rung <= Rung.SHED_BATCH and not mixed:
        return Rung.NORMAL
    return Rung(rung - 1)


# -- one request ---------------------------------------------------------------------------------------------


class Way(enum.StrEnum):
    """What becomes of a request."""

    RUN = "run"  # placed as usual
    UNIFIED = "unified"  # on a unified worker, `x-pdgate-path: fallback`
    LOCAL = "local"  # another, smaller model
    WAIT = "wait"  # its turn comes when a pair is back, or room on the unified workers
    SHED = "shed"  # refused: its tier gives way
    UNAVAILABLE = "unavailable"  # refused: nobody is served


class Hybrid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's consent to a local model, and the part of its requests that goes there when all is well."""

    share: float = 0.0
    """Share (0 to 1) of its requests, by chance: 0.2 sends 20 % to the local model."""
    up_to_tokens: int = 0
    """Prompts up to this length go there, too."""


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """What the ladder needs to know of a request."""

    tier: str
    uncached_tokens: int
    hybrid: Hybrid | None = None
    """None = its tenant takes this model or none."""
    draw: float = 0.5
    """Uniform in [0, 1): the caller's randomness."""


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool has at the moment of asking."""

    pairs: bool
    wants_pairs: bool
    unified: int
    unified_queued_tokens: int
    """Prompt tokens queued on unified workers."""
    local_model: bool
    """A local model is up."""


def passage(rung: Rung, request: Asking, ground: Ground, limits: LadderLimits) -> Way:
    """Return what becomes of a request on a rung."""
    rank = TIER_RANK.get(request.tier, TIER_RANK["default"])
    takes_local = request.hybrid is not None and ground.local_model
    if takes_local and (rung >= Rung.LOCAL or _by_share(request)):
        return Way.LOCAL
    if rung is Rung.UNAVAILABLE or not (ground.pairs or ground.unified):
        return Way.UNAVAILABLE
    if rung >= Rung.SHED_BATCH and rank >= TIER_RANK["batch"]:
        return Way.SHED
    if rung >= Rung.SHED_FLEX and rank >= TIER_RANK["flex"]:
        return Way.SHED
    if rung is Rung.NORMAL or not ground.unified or not ground.wants_pairs:
        return Way.RUN
    return _beside_pairs(rung, request, ground, limits)


def _beside_pairs(rung: Rung, request: Asking, ground: Ground, limits: LadderLimits) -> Way:
    """Return whether unified workers take a request that the pairs were meant for."""
    if request.uncached_tokens <= limits.short_tokens:
        return Way.UNIFIED
    queued = ground.unified_queued_tokens
    fits = not queued or queued + request.uncached_tokens <= limits.unified_budget_tokens
    if rung >= Rung.LONGER_ON_UNIFIED and fits:
        return Way.UNIFIED
    return Way.RUN if ground.pairs else Way.WAIT


def _by_share(request: Asking) -> bool:
    assert request.hybrid is not None
    return request.draw < request.hybrid.share or request.uncached_tokens <= request.hybrid.up_to_tokens
