"""Runs of the bars, each kept in a file once it is done, and the search for the best static split in hindsight."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

import scheduler.policy
import scheduler.simulator
from benches.bar_loads import TARGET, WORKERS, Load, Row
from contracts.lifecycle import HandOff, Role
from scheduler.policy.demand import Forecast
from scheduler.policy.offers import cheapest_donor
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Move
from scheduler.simulator.arrivals import Arrival
from scheduler.simulator.pilot import FleetSight, StaticPilot
from scheduler.simulator.play import Policy, first_split, pilot_of, result_of
from scheduler.simulator.report import met_targets
from scheduler.simulator.setup import Placer, Setup
from scheduler.simulator.simulation import Simulation

BIN_S = 10.0
_CONTROLLER = {
    "bursts.py",
    "ratio.py",
    "ways.py",
    "offers.py",
    "reserve.py",
    "sight.py",
    "demand.py",
    "queueing.py",
    "decisions.py",
    "ladder.py",
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one load under one policy."""

    requests: int
    attainment: float
    """Of feasible requests, refused ones counted as missed, 0.0 to 1.0."""
    flips: int
    end: str
    """The split at the end."""
    course: list[tuple[int, int]]
    """Feasible requests, and met ones, by arrival in bins of BIN_S."""
    batch_tokens_per_s: float = 0.0
    tenants: dict[str, float] = {}
    """Attainment by tenant."""


class Dissolving(StaticPilot):
    """Turns one worker after the other to unified, from the first second on, whatever arrives."""

    period_s = 1.0

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:  # noqa: ARG002
        """Take one from the larger side of the pairs, as soon as the last one is there."""
        role = Role.PREFILL if sight.split.prefill >= sight.split.decode else Role.DECODE
        donor = cheapest_donor(role, sight.donors)
        if sight.moving or donor is None:
            return None
        return Move(worker_id=donor.worker_id, from_role=role, to_role=Role.UNIFIED)


class Runner:
    """Plays what has not been played by this code yet."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._code = {True: _fingerprint(controller=True), False: _fingerprint(controller=False)}
        self._loads: dict[tuple[str, int], list[Arrival]] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def run(
        self,
        name: str,
        load: Load,
        seed: int,
        policy: Policy,
        split: Split,
        *,
        hand_off: HandOff = HandOff.DIRECT,
        placer: Placer = Placer.SCORED,
        group_batches: bool = True,
        dissolving: bool = False,
    ) -> Run:
        """Return a run, from the file if it is there. `dissolving`: not the policy but `Dissolving` moves workers."""
        steered = policy not in (Policy.STATIC, Policy.UNIFIED)
        key = f"{name} {seed} {policy} {split} {hand_off} {placer} {group_batches}{' dissolving' * dissolving}"
        digest = hashlib.sha256(f"{key} {self._code[steered]}".encode()).hexdigest()[:16]
        file = self._directory / f"{digest}.json"
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Run)
        arrivals = self._arrivals(name, load, seed)
        setup = Setup(
            split=split, target=TARGET, hand_off=hand_off, placer=placer, group_batches=group_batches, seed=seed
        )
        simulation = Simulation(setup, Dissolving() if dissolving else pilot_of(policy, setup))
        simulation.run(arrivals)
        result = result_of(simulation)
        jobs = [job for job in simulation.jobs.values() if not job.batch and job.feasible]
        course: dict[int, list[int]] = {}
        tenants: dict[str, list[int]] = {}
        for job in jobs:
            met = met_targets(job, TARGET)
            for counts in (
                course.setdefault(int(job.arrival.at_s / BIN_S), [0, 0]),
                tenants.setdefault(job.arrival.tenant, [0, 0]),
            ):
                counts[0] += 1
                counts[1] += met
        run = Run(
            requests=result.requests,
            attainment=result.attainment_total,
            flips=result.flips,
            end=str(simulation.split()),
            course=[(n, m) for n, m in (course.get(b, (0, 0)) for b in range(max(course, default=0) + 1))],
            batch_tokens_per_s=result.batch_tokens_per_s,
            tenants={tenant: met / number for tenant, (number, met) in sorted(tenants.items())},
        )
        file.write_bytes(msgspec.json.encode(run))
        self._say(f"{key}: {run.attainment:.1%}, {run.flips} flips, {run.end}")
        return run

    def statics(
        self, name: str, load: Load, seed: int, hand_off: HandOff, *, placer: Placer = Placer.SCORED
    ) -> dict[Split, Run]:
        """Return static runs: pairs by a climb from the middle, and the candidates with unified workers."""
        found: dict[Split, Run] = {}

        def value(split: Split) -> float:
            if split not in found:
                found[split] = self.run(name, load, seed, Policy.STATIC, split, hand_off=hand_off, placer=placer)
            return found[split].attainment

        at = WORKERS // 2
        while True:
            near = [p for p in (at - 1, at, at + 1) if 0 < p < WORKERS]
            better = max(near, key=lambda p: value(Split(prefill=p, decode=WORKERS - p)))
            if better == at:
                break
            at = better
        for split in MIXED:
            value(split)
        return found

    def policy(self, row: Row, seed: int, policy: Policy) -> Run:
        """Return a policy's run from the row's first split, or its own."""
        own = first_split(policy, WORKERS, row.hand_off)
        split = row.first if row.first is not None and policy is not Policy.UNIFIED else own
        return self.run(row.name, row.load, seed, policy, split, hand_off=row.hand_off)

    def _arrivals(self, name: str, load: Load, seed: int) -> list[Arrival]:
        if (name, seed) not in self._loads:
            self._loads = {(name, seed): load(seed)}  # one at a time: they are large
        return self._loads[name, seed]


MIXED = (
    Split(prefill=5, decode=2, unified=1),
    Split(prefill=4, decode=3, unified=1),
    Split(prefill=2, decode=5, unified=1),
    Split(prefill=2, decode=2, unified=4),
    Split(unified=8),
)
"""Splits with unified workers that are tried."""


def best_of(runs: Mapping[Split, Run], *, pairs_only: bool = False) -> tuple[Split, Run]:
    """Return the split that did best in hindsight."""
    splits = [split for split in runs if not (pairs_only and split.unified)]
    best = max(splits, key=lambda split: runs[split].attainment)
    return best, runs[best]


def _fingerprint(*, controller: bool) -> str:
    """Return a hash of the code that a run depends on; static runs do not depend on the controller."""
    digest = hashlib.sha256()
    for package in (scheduler.policy, scheduler.simulator):
        for file in sorted(Path(package.__file__ or "").parent.glob("*.py")):
            steering = file.name in _CONTROLLER or file.name in ("pilot.py", "rivals.py", "play.py")
            if controller or not steering:
                digest.update(file.read_bytes())
    digest.update(Path(__file__).with_name("bar_loads.py").read_bytes())
    return digest.hexdigest()
