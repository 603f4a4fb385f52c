"""One plan: from what the user asks to the whole answer, ready to print or to save."""

from collections.abc import Callable

import msgspec

from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from pdgate.plan.assumptions import assumptions_of
from pdgate.plan.calibration import Calibration
from pdgate.plan.compare import Ask, Option
from pdgate.plan.day import Day, day_of
from pdgate.plan.decide import Choice, Expected, Rule, Smallest, Verdict, decide
from pdgate.plan.fleet import FitErrors, Setting, runs_on
from pdgate.plan.mixture import Mixture, mixture_of
from pdgate.plan.money import Money, PerMillion
from pdgate.plan.played import Agreement, agreement_of
from pdgate.plan.portrait import Portrait, portray
from pdgate.plan.question import Question
from pdgate.plan.sensitivity import Sensitivity, SurfacePoint, sensitivity_of, surface_of
from pdgate.plan.shapes import Kind
from pdgate.plan.traffic import Traffics
from pdgate.plan.workload import Workload, WorkloadError

CALIBRATED_ERROR = 0.068  # TPOT of systems of which three runs are known (`python -m benches.plan_fit`)
DECISION_STEPS, SIMULATION_STEPS, SURFACE_STEPS = 33, 4, 5  # messages of each part, for the bar


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of one worker per pool, 0 = no such pool."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Money is in `money.currency`; shares are 0 to 1."""

    verdict: Verdict
    reason: str
    prefill: int  # workers
    decode: int
    unified: int
    parallelism: Parallelism
    hand_off: str | None  # "direct" or "store"; None = nothing is handed off
    short_prompt_tokens: int  # up to so many uncached tokens go to unified workers
    goodput_gain: (
        float | None
    )  # of the best split over the best unified fleet; None = unified keeps the targets at no rate
    goodput_gain_low: float | None
    goodput_gain_high: float | None
    cost_saving: float | None
    cost_per_million: PerMillion | None
    model: str
    fleet: str
    target: SloTarget
    attainment: float
    planned_rps: float
    capacity_rps: float  # highest rate at which the chosen workers keep the targets
    binding: str
    expected: Expected | None
    rule: Rule | None
    options: list[Option]
    smallest_unified: Smallest | None
    smallest_split: Smallest | None
    money: Money | None
    workload: Portrait
    simulation: Agreement | None  # None = not asked for
    sensitivity: Sensitivity | None
    surface: list[SurfacePoint]
    assumptions: list[str]
    latency: dict[str, LatencyModel]  # by role, of the chosen workers
    layout: dict[str, str]  # by role: "TP4", "TP8 DP8", "EP16"
    mixture: Mixture | None  # None = a dense model
    day: Day | None  # None = no daily curve


def make_plan(
    question: Question,
    *,
    with_simulation: bool = True,
    with_surface: bool = False,
    progress: Callable[[str, float], None] = lambda _now, _share: None,
) -> Plan:
    """Return the plan for a question.

    Args:
        question: what to plan for.
        with_simulation: also play the fleets under the production policy.
        with_surface: also compute the break-even surface.
        progress: told what is being done and the share (0 to 1) of the work that is behind.

    Raises:
        WorkloadError: the question cannot be answered as asked (too many kinds of GPU, a bad network, an engine that
            does not run on them).
    """
    for _, gpu in question.fleet:
        if not runs_on(question.engine, gpu):
            raise WorkloadError(f"engine {question.engine} does not run on {gpu.name} ({gpu.maker})")
    stages = _Stages(progress, with_simulation=with_simulation, with_surface=with_surface)
    told = stages.tell
    told("reading the traffic")
    mean_rate = question.workload.rate_rps * question.growth
    workload = question.workload.at_rate(mean_rate * question.peak)
    traffics = Traffics(workload, question.target)
    setting = Setting(
        shape=question.shape,
        fit=question.fit,
        weights=question.weights,
        kv=question.kv,
        engine=question.engine,
        target=question.target,
        moments=traffics.moments,
        network=question.network,
        attainment=question.attainment,
        mixing=question.mixing,
        speculation=question.speculation,
        expert_parallel=question.expert_parallel,
        expert_copies=question.expert_copies,
        hits=question.hits,
        errors=_errors(question.calibration),
    )
    ask = Ask(
        fleet=question.fleet,
        currency=question.currency,
        network_per_hour=question.network_per_hour,
        operations_per_hour=question.operations_per_hour,
        prices=question.prices,
        mean_rate_rps=mean_rate,
        alternatives=question.alternatives,
        local=question.local,
    )
    choice = decide(ask, traffics, setting, told)
    simulation = agreement_of(workload, setting, choice, told) if with_simulation else None
    sensitivity = sensitivity_of(ask, traffics, setting, choice, told)
    surface = surface_of(ask, traffics, setting, choice, told) if with_surface else []
    day = day_of(workload.hourly, ask, traffics, setting, choice.shape)
    mixture = mixture_of(choice.shape, setting, traffics.whole(None), workload.rate_rps)
    return _answer(question, workload, choice, simulation, sensitivity, surface, mixture, day)


class _Stages:
    """Turns "now this" into a share of the work: the number of messages is known beforehand to a few."""

    def __init__(self, progress: Callable[[str, float], None], *, with_simulation: bool, with_surface: bool) -> None:
        self._progress = progress
        self._total = DECISION_STEPS + SIMULATION_STEPS * with_simulation + SURFACE_STEPS * with_surface
        self._done = 0

    def tell(self, now: str) -> None:
        self._progress(now, min(0.99, self._done / self._total))
        self._done += 1


def _answer(
    question: Question,
    workload: Workload,
    choice: Choice,
    simulation: Agreement | None,
    sensitivity: Sensitivity | None,
    surface: list[SurfacePoint],
    mixture: Mixture | None,
    day: Day | None,
) -> Plan:
    shape = choice.shape
    pools = dict(shape.roles()) if shape is not None else {}
    split = shape is not None and shape.kind is not Kind.UNIFIED
    store = shape is not None and shape.kind is Kind.STORE
    capacity = next(
        (found[1] for found in (choice.unified, choice.split) if found is not None and found[0] is shape),
        workload.rate_rps if shape else 0.0,
    )
    infinite = choice.goodput_gain == float("inf")
    return Plan(
        verdict=choice.verdict,
        reason=choice.reason,
        prefill=shape.prefill if shape else 0,
        decode=shape.decode if shape else 0,
        unified=shape.unified if shape else 0,
        parallelism=Parallelism(**{role: worker.use.gpus for role, worker in pools.items()}),
        hand_off=("store" if store else "direct") if split else None,
        short_prompt_tokens=shape.short_prompt_tokens if shape else 0,
        goodput_gain=None if infinite else choice.goodput_gain,
        goodput_gain_low=sensitivity.low if sensitivity else None,
        goodput_gain_high=sensitivity.high if sensitivity else None,
        cost_saving=choice.cost_saving,
        cost_per_million=choice.money.per_million if choice.money else None,
        model=question.shape.name,
        fleet=", ".join(f"{count}x{gpu.name}" for count, gpu in question.fleet),
        target=question.target,
        attainment=question.attainment,
        planned_rps=workload.rate_rps,
        capacity_rps=capacity,
        binding=choice.binding,
        expected=choice.expected,
        rule=choice.rule,
        options=choice.options,
        smallest_unified=choice.smallest_unified,
        smallest_split=choice.smallest_split,
        money=choice.money,
        workload=portray(workload),
        simulation=simulation,
        sensitivity=sensitivity,
        surface=surface,
        assumptions=assumptions_of(question, workload),
        latency={role: worker.latency for role, worker in pools.items()},
        layout={role: worker.label for role, worker in pools.items()},
        mixture=mixture,
        day=day,
    )


def _errors(calibration: Calibration | None) -> FitErrors:
    """What the range is computed with: a calibration errs at least as the held-out ones of the public runs do."""
    if calibration is None:
        return FitErrors()
    return FitErrors(decode=max(CALIBRATED_ERROR, calibration.after))
