"""The tables of docs/planner.md that follow from the results of the planner's benches; `make docs` writes them."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from benches.plan_agreement import NEAR_BEST, played_with, wilson
from benches.plan_agreement import RESULTS as AGREEMENT
from benches.plan_agreement import Found as Agreement
from benches.plan_cases import cases
from benches.plan_mocker import QUESTIONS
from benches.plan_mocker import RESULTS as MOCKER
from benches.plan_mocker import Row as Mocked
from benches.plan_pairs import RESULTS as PAIRS
from benches.plan_pairs import Report
from benches.plan_peers import RESULTS as PEERS
from benches.plan_peers import Found as Peers
from benches.plan_peers import RunRow, judged
from pdgate.plan.fit import CLAIM_ROWS
from pdgate.plan.workload import mean, percentile

SHARES = ["| | n | share | 95 % interval |", "|---|---|---|---|"]


def agreement_table() -> str:
    """Closed form against simulation."""
    found = msgspec.json.decode(AGREEMENT.read_bytes(), type=Agreement)
    lines = [
        *SHARES,
        _share('both say the same of "a split gains 30 %"', [d.agrees for d in found.decisions]),
        _share(
            "at 1.1 times its capacity the chosen ratio is within 3 % of the best of it and its neighbours",
            [r.of_best >= NEAR_BEST for r in found.ratios],
        ),
    ]
    said = [_apart(d.case.traffic for d in found.decisions if not d.agrees)]
    asked = len(list(cases()))
    for part, rows in (("decisions", found.decisions), ("ratios", found.ratios)):
        played = len(rows) + sum(name == part for name, _ in found.undecided)
        if played < asked:
            said.append(f"Of the {part} {asked - played} of {asked} questions are still to be played.")
    if not found.played_with.startswith(played_with(0).partition(",")[0]):
        said.append("Played with other factors than today's: stale until it is run again.")
    return "\n".join([*lines, "", " ".join(said)])


def mocker_table() -> str:
    """Closed form against Dynamo's mocker."""
    rows = msgspec.json.decode(MOCKER.read_bytes(), type=list[Mocked])
    gains = sorted(abs(r.gain - r.mocker_gain) for r in rows if r.gain is not None and r.mocker_gain is not None)
    lines = [
        *SHARES,
        _share('both say the same of "a split gains 30 %"', [r.agrees for r in rows]),
        _share("the chosen split serves within 3 % of the mocker's best", [r.of_best >= NEAR_BEST for r in rows]),
    ]
    said = f"The gains differ by {100 * percentile(gains, 0.5):.0f} points in the median. "
    said += _apart(r.traffic for r in rows if not r.agrees)
    if len(rows) < CLAIM_ROWS:
        said += f" With {len(rows)} of {QUESTIONS} questions, under {CLAIM_ROWS}, nothing is claimed."
    return "\n".join([*lines, "", said])


def pairs_table() -> str:
    """Predicted against measured gains of a split."""
    reports = msgspec.json.decode(PAIRS.read_bytes(), type=dict[str, Report])
    lines = list(SHARES)
    for name, report in reports.items():
        about = f" ({name})"
        for text, (hits, n, low, high) in (
            ('both say the same of "a split gains 30 %"', report.same_rule),
            ("both say which is better", report.same_winner),
        ):
            lines.append(f"| {text}{about} | {n} | {_percent(hits / n)} | {100 * low:.0f} to {100 * high:.0f} % |")
    return "\n".join(lines)


def peers_table() -> str:
    """Beside aiconfigurator on measured runs."""
    found = msgspec.json.decode(PEERS.read_bytes(), type=Peers)
    lines = [
        "| | runs asked | answered | TPOT, ours | TPOT, aiconfigurator | TTFT*, ours | TTFT*, aiconfigurator |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = {r.group: [x for x in found.runs if x.group == r.group] for r in found.runs}
    for group, rows in [*sorted(groups.items()), ("all", found.runs)]:
        both = [r for r in rows if r.peer_tpot_ms is not None]
        calm = [r for r in both if r.unloaded]
        cells = (
            _mape([r.ours_tpot_ms / r.tpot_ms for r in both]),
            _mape([(r.peer_tpot_ms or 0.0) / r.tpot_ms for r in both]),
            _mape([r.ours_ttft_ms / r.ttft_ms for r in calm]),
            _mape([(r.peer_ttft_ms or 0.0) / r.ttft_ms for r in calm]),
        )
        lines.append(f"| {group} | {len(rows)} | {len(both)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", " ".join(_peer_notes(found))])


def choices_table() -> str:
    """Beside aiconfigurator on whether to split."""
    found = msgspec.json.decode(PEERS.read_bytes(), type=Peers)
    lines = [
        "| system | TPOT | measured | ours | peer | tokens/s**, measured | ours | peer | CPU s, ours | peer |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in found.choices:
        gains = " | ".join("-" if g is None else f"{100 * g:+.0f} %" for g in (c.measured, c.ours, c.peer))
        tokens = " | ".join(f"{one:.0f} to {two:.0f}" for one, two in (c.measured_tokens, c.ours_tokens, c.peer_tokens))
        lines.append(f"| {c.system} | {c.tpot_ms:g} ms | {gains} | {tokens} | {c.ours_s:.1f} | {c.peer_s:.1f} |")
    said = []
    for who, name in (("ours", "ours"), ("peer", "aiconfigurator")):
        one = judged(found.choices, who)
        said.append(
            f"{name}: the measured answer to 30 % in {one.same} of {one.number}, the gain (as a ratio) off by a factor "
            f"of {percentile(one.gain_errors, 0.5):.2f} in the median, tokens per second and GPU by "
            f"{percentile(one.token_errors, 0.5):.2f}"
        )
    return "\n".join([*lines, "", f"{'; '.join(said)}. Under {CLAIM_ROWS} questions: reported, not claimed."])


def _peer_notes(found: Peers) -> list[str]:
    """What it did not answer, and why."""
    refused: dict[str, list[RunRow]] = {}
    for row in found.runs:
        if row.peer_refused:
            refused.setdefault(row.peer_refused, []).append(row)
    notes = [
        f'Refused, {len(rows)} of {", ".join(sorted({r.group for r in rows}))}: "{why}".'
        for why, rows in refused.items()
    ]
    if found.not_asked:
        notes.append(f"{found.not_asked} questions were not asked yet.")
    return [
        f"CPU per run: {1e3 * found.ours_run_s:.2f} ms and {found.peer_run_s:.1f} s.",
        *(notes or ["Every question was asked and answered."]),
    ]


def _apart(traffics: Iterable[str]) -> str:
    where = ", ".join(f"{count} {traffic}" for traffic, count in Counter(traffics).most_common())
    return f"Disagreements by traffic: {where or 'none'}."


def _share(text: str, hits: Sequence[bool]) -> str:
    low, high = wilson(sum(hits), len(hits))
    return f"| {text} | {len(hits)} | {_percent(sum(hits) / len(hits))} | {100 * low:.0f} to {100 * high:.0f} % |"


def _mape(ratios: Sequence[float]) -> str:
    return f"{100 * mean([abs(r - 1) for r in ratios]):.1f} %" if ratios else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
