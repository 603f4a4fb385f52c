"""`pdgate replay`: play a decision log again under another policy, and say what would have come of it.

The log has what was asked and what was decided; the simulator has workers of the logged costs. So three figures stand
beside each other: what really happened, the logged role changes in the simulator (how far the simulator is to be
trusted), and the other policy in the same simulator.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from contracts.lifecycle import Role, WorkerState
from contracts.slo import SloTarget
from pdgate.output import show_json
from pdgate.preflight import CannotStart
from pdgate.simulate import PolicyError, parse_policy
from scheduler.policy.decisions import Arrived, Ended, Head, LogError, Record, Refused, Ticked, WorkerSeen, decode
from scheduler.policy.demand import Forecast
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Move
from scheduler.simulator.arrivals import BLOCK_TOKENS, Arrival
from scheduler.simulator.pilot import FleetSight, StaticPilot
from scheduler.simulator.play import Policy, play, result_of
from scheduler.simulator.report import Result
from scheduler.simulator.setup import Setup
from scheduler.simulator.simulation import Simulation

_TICK_S = 1.0


class ReplayError(ValueError):
    """The log cannot be played; the message says what is missing."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of all logged requests; those refused or without an end count as missed."""

    attainment: float
    goodput_rps: float
    flips: int


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    policy: str
    requests: int
    without_end: int
    """Requests whose answer the log does not hold; the mean answer is played for them."""
    duration_s: float
    first_split: str
    logged: Outcome
    logged_in_simulator: Outcome
    counterfactual: Outcome
    counterfactual_split: str
    """At the end."""


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """A log, taken apart."""

    head: Head
    arrived: list[Arrived]
    ended: dict[str, Ended]
    refused: frozenset[str]
    moves: list[tuple[float, Move]]
    """Seconds, and the move."""
    split: Split
    """Ready workers at the beginning."""


def replay(
    log: Annotated[Path, typer.Argument(help="A file of the decision log (JSON lines).", show_default=False)],
    policy: Annotated[
        str, typer.Option(help="auto, static:P/D or static:P/D/U, unified, threshold or planner.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of the policy's draws.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Re-run a decision log under a policy and report the counterfactual goodput."""
    try:
        with log.open("rb") as lines:
            got = counterfactual(read_log(decode(lines)), policy, seed)
    except (OSError, LogError, PolicyError, ReplayError) as error:
        raise CannotStart(f"{log}: {error}" if not isinstance(error, OSError) else str(error)) from None
    if as_json:
        show_json(got)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "attainment", "goodput, requests/s", "flips"):
        table.add_column(column, justify="left" if not column else "right")
    for name, outcome in (
        ("logged", got.logged),
        ("logged role changes, simulated", got.logged_in_simulator),
        (f"{policy}, simulated", got.counterfactual),
    ):
        table.add_row(name, f"{outcome.attainment:.1%}", f"{outcome.goodput_rps:.2f}", str(outcome.flips))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{got.requests:,} requests in {got.duration_s:,.0f} s from {got.first_split}; "
        f"{got.without_end:,} without a logged end"
    )


def read_log(records: Iterable[Record]) -> Logged:
    """Take a log apart. Raises ReplayError, and LogError for a line that is no record."""
    head: Head | None = None
    arrived: list[Arrived] = []
    ended: dict[str, Ended] = {}
    refused: set[str] = set()
    moves: list[tuple[float, Move]] = []
    first: dict[str, WorkerSeen] = {}
    for record in records:
        match record:
            case Head():
                head = head or record
            case Arrived():
                arrived.append(record)
            case Ended():
                ended[record.rid] = record
            case Refused():
                refused.add(record.rid)
            case Ticked(move=Move() as move):
                moves.append((record.at_ms / 1000, move))
            case WorkerSeen():
                first.setdefault(record.worker_id, record)
    if head is None:
        raise ReplayError("no head: not the beginning of a log file")
    if not arrived:
        raise ReplayError("no request arrived in this file")
    split = _ready(worker for worker in first.values() if worker.at_ms <= arrived[0].at_ms)
    return Logged(head=head, arrived=arrived, ended=ended, refused=frozenset(refused), moves=moves, split=split)


def _ready(workers: Iterable[WorkerSeen]) -> Split:
    ready = [worker.role for worker in workers if worker.state is WorkerState.READY]
    split = Split(**{role.value: ready.count(role) for role in Role})
    if not split.unified and not (split.prefill and split.decode):
        raise ReplayError(f"the workers at its beginning ({split}) can serve nothing")
    return split


def counterfactual(logged: Logged, policy: str, seed: int) -> Replay:
    """Play a log under a policy that begins with the logged split, unless the policy names its own."""
    chosen, split = parse_policy(policy, logged.split.total, logged.head.hand_off)
    if ":" not in policy and chosen is not Policy.UNIFIED:
        split = logged.split
    arrivals = arrivals_of(logged)
    setup = Setup(
        split=logged.split,
        target=_target(logged),
        latency=logged.head.latency,
        hand_off=logged.head.hand_off,
        seed=seed,
    )
    result, simulation = play(arrivals, msgspec.structs.replace(setup, split=split), chosen)
    again = Simulation(setup, _LoggedPilot(logged))
    again.run(arrivals)
    duration_s = result.duration_s
    met = sum(1 for request in logged.arrived if request.rid in logged.ended and logged.ended[request.rid].met)
    return Replay(
        policy=policy,
        requests=len(arrivals),
        without_end=sum(1 for request in logged.arrived if request.rid not in logged.ended),
        duration_s=round(duration_s, 1),
        first_split=str(logged.split),
        logged=Outcome(
            attainment=round(met / len(arrivals), 4),
            goodput_rps=round(met / duration_s, 3) if duration_s else 0.0,
            flips=len(logged.moves),
        ),
        logged_in_simulator=_outcome(result_of(again)),
        counterfactual=_outcome(result),
        counterfactual_split=str(simulation.split()),
    )


def arrivals_of(logged: Logged) -> list[Arrival]:
    """Return the logged requests as the simulator plays them, times from the first one."""
    lengths = [end.output_tokens for end in logged.ended.values() if end.output_tokens]
    usual = round(sum(lengths) / len(lengths)) if lengths else 1
    start_ms = logged.arrived[0].at_ms
    block_tokens = logged.head.block_tokens
    every = BLOCK_TOKENS // block_tokens if block_tokens and BLOCK_TOKENS % block_tokens == 0 else 0
    found = []
    for request in logged.arrived:
        end = logged.ended.get(request.rid)
        output = max(1, end.output_tokens if end is not None and end.output_tokens else usual)
        found.append(
            Arrival(
                at_s=(request.at_ms - start_ms) / 1000,
                prompt_tokens=request.prompt_tokens,
                output_tokens=output,
                max_tokens=max(request.max_tokens, output),
                tenant=request.tenant,
                tier=request.tier,
                session=request.session,
                blocks=request.blocks[every - 1 :: every] if every else (),  # a hash names all before it, too
            )
        )
    return sorted(found, key=lambda arrival: arrival.at_s)


def _target(logged: Logged) -> SloTarget:
    """Return the targets of the tier with most requests: the simulator has one set for all interactive ones."""
    tiers = [request.tier for request in logged.arrived if request.tier != "batch"]
    most = max(set(tiers), key=tiers.count, default="default")
    return logged.head.targets.get(most, SloTarget())


def _outcome(result: Result) -> Outcome:
    return Outcome(
        attainment=round(result.attainment_total, 4), goodput_rps=round(result.goodput_rps, 3), flips=result.flips
    )


class _LoggedPilot(StaticPilot):
    """Makes the logged moves at their times, by whichever worker of the role is empty first."""

    period_s = _TICK_S

    def __init__(self, logged: Logged) -> None:
        start_s = logged.arrived[0].at_ms / 1000
        self._moves = [(at_s - start_s, move) for at_s, move in logged.moves]

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:  # noqa: ARG002
        if sight.moving or not self._moves or self._moves[0][0] > now_s:
            return None
        _, logged = self._moves.pop(0)
        donors = [donor for donor in sight.donors if donor.role is logged.from_role]
        if not donors:
            return None
        donor = min(donors, key=lambda d: (d.drain_s, d.worker_id))
        return msgspec.structs.replace(logged, worker_id=donor.worker_id)
