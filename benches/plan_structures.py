"""Whether another latency model would predict unseen systems better: `python -m benches.plan_structures`.

The groups (model and GPU), in alphabetical order, are dealt into two halves. A structure may be chosen by its errors on
the first; the second says whether the choice was right. Every group is predicted by a fit on all the others, whichever
half they are in. Structures beside the planner's own:

* prefill: experts in FP8 have a factor of their own, a mixture's tokens are copied to each of their experts through
  memory, and each engine has a time per layer beside its front latency; prompts mixed into decode steps have a factor
  for dense models and one for mixtures.
* shared effects: the median error that a model with this engine and format has on its other GPUs, shrunken to one half
  where it is known from one of them, is taken off.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import msgspec
from rich.console import Console
from rich.table import Table

from pdgate.plan.fit import ENGINES, decode_columns, group_weights, prefill_features, unloaded
from pdgate.plan.least_squares import predict, robust_fit
from pdgate.plan.measured import Measured, read_silicon
from pdgate.plan.workload import mean, percentile

SHRINK = 1.0  # groups that the prior of no effect counts as
OWN_PREFILL = (0, 1, 2, 4)  # features of a prompt's compute; the others are fixed times or part of the decode step


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A way to predict both latencies from rows."""

    name: str
    richer_prefill: bool
    shared_effects: bool

    def first(self, row: Measured) -> list[float]:
        """Terms of TTFT."""
        own = prefill_features(row)
        if not self.richer_prefill:
            return own
        shape, moe_ms = row.shape, row.prefill.moe_compute_ms
        copies = row.prompt_tokens * shape.hidden * shape.layers * 2.0 * shape.experts_per_token
        return [
            *own,
            moe_ms if row.use.weights == "fp8" else 0.0,
            copies / row.gpu.bytes_per_s * 1000,
            *(float(shape.layers) * (row.engine == engine) for engine in ENGINES),
        ]

    def step(self, row: Measured, prefill: Sequence[float]) -> list[float]:
        """Terms of TPOT."""
        terms = self.first(row)
        compute = [*OWN_PREFILL, *((len(terms) - 5, len(terms) - 4) if self.richer_prefill else ())]
        mixed = (row.concurrency - 1) * sum(prefill[i] * terms[i] for i in compute) / row.output_tokens
        if not self.richer_prefill:
            return [*decode_columns(row.decode), mixed]
        dense = not row.shape.experts
        return [*decode_columns(row.decode), mixed * dense, mixed * (not dense)]


STRUCTURES = [
    Structure(name=" + ".join(names) or "the planner's", richer_prefill=richer, shared_effects=shared)
    for richer, shared in product((False, True), repeat=2)
    for names in [["prefill"] * richer + ["shared effects"] * shared]
]


def main() -> None:
    """Print the errors of each structure on each half."""
    rows, _ = read_silicon()
    groups = sorted({r.group for r in rows})
    halves = {"first half": set(groups[::2]), "second half": set(groups[1::2])}
    table = Table(title="MAPE on unseen groups", title_justify="left", box=None)
    for column in ("structure", *(f"{kind}, {half}" for kind in ("TPOT", "TTFT") for half in halves)):
        table.add_column(column, justify="left" if column == "structure" else "right")
    for structure in STRUCTURES:
        errors = errors_of(structure, rows)
        table.add_row(
            structure.name,
            *(
                f"{mean([e for group in half for e in errors[kind][group]]):.1%}"
                for kind in ("TPOT", "TTFT")
                for half in halves.values()
            ),
        )
    console = Console(width=120)
    console.print(table)
    for half, members in halves.items():
        count = sum(r.group in members for r in rows)
        console.print(f"{half}, {count} runs: {', '.join(sorted(members))}")


def errors_of(structure: Structure, rows: Sequence[Measured]) -> dict[str, dict[str, list[float]]]:
    """Return the absolute relative errors of TPOT and TTFT by group, each group predicted by a fit without it."""
    found: dict[str, dict[str, list[float]]] = {"TPOT": {}, "TTFT": {}}
    for group in sorted({r.group for r in rows}):
        seen = [r for r in rows if r.group != group]
        members = [r for r in rows if r.group == group]
        alone = unloaded(seen)
        prefill = robust_fit([structure.first(r) for r in alone], [r.ttft_ms for r in alone], group_weights(alone))
        found["TTFT"][group] = [abs(predict(prefill, structure.first(r)) / r.ttft_ms - 1) for r in unloaded(members)]
        decode = robust_fit([structure.step(r, prefill) for r in seen], [r.tpot_ms for r in seen], group_weights(seen))

        def tpot_ms(row: Measured, prefill: Sequence[float] = prefill, decode: Sequence[float] = decode) -> float:
            return predict(decode, structure.step(row, prefill))

        effects = _effects(seen, tpot_ms) if structure.shared_effects else {}
        found["TPOT"][group] = [abs(tpot_ms(r) * effects.get(_shared(r), 1.0) / r.tpot_ms - 1) for r in members]
    return found


def _effects(rows: Sequence[Measured], tpot_ms: Callable[[Measured], float]) -> dict[tuple[str, ...], float]:
    """Factor for each model, engine and format: what the fit leaves in the median of each of its groups, shrunken."""
    left: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        left[_shared(row)][row.group].append(math.log(row.tpot_ms / tpot_ms(row)))
    return {
        key: math.exp(sum(percentile(sorted(logs), 0.5) for logs in groups.values()) / (len(groups) + SHRINK))
        for key, groups in left.items()
    }


def _shared(row: Measured) -> tuple[str, ...]:
    return row.shape.name, row.engine, row.use.weights


if __name__ == "__main__":
    main()
