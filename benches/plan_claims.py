"""Popular rules about splitting prefill and decode, with our figures; writes docs/claims.md.

`python -m benches.plan_claims`; the verdicts follow from the figures.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from benches.plan_cases import TRAFFIC, Case, answer, cases
from contracts.perf import TransferCost
from pdgate.plan.decide import WORTH, Choice, expected_of
from pdgate.plan.described import DATA
from pdgate.plan.hardware import accelerators
from pdgate.plan.models import find_model
from pdgate.plan.options import capacity_rps, load_of
from pdgate.plan.portrait import portray
from pdgate.plan.shapes import Shape
from pdgate.plan.traces import read_trace
from pdgate.plan.workload import percentile

MOSTLY = 0.8  # share of the cases that makes a rule hold
PAGE = Path(__file__).parent.parent / "docs" / "claims.md"
OTHERS = ("H20", "H200", "A100", "L40S", "MI300X", "MI325X", "MI355X")
FLEETS = ("4xH100", "8xH100", "16xH100", "32xH100", "64xH100")
TRACES = ("AzureLLMInferenceTrace_code.csv.xz", "AzureLLMInferenceTrace_conv.csv.xz", "conversation_trace.jsonl.xz")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One popular rule and what we found."""

    rule: str
    found: str
    conditions: str
    verdict: str


def main() -> None:
    """Compute the figures and write the page."""
    grid = [(case, answer(case)[0]) for case in cases()]
    claims = [
        ratio(grid),
        ratio_across_nodes(),
        small_models(),
        rates(),
        short_prompts(),
        tails(),
        heterogeneous(grid),
        gains(grid),
        loose_targets(grid),
        offline(),
        transfer(),
    ]
    PAGE.write_text(page(claims), encoding="utf-8")
    print(f"wrote {PAGE.name}: {len(claims)} claims")


def page(claims: Sequence[Claim]) -> str:
    """Return the page."""
    lines = [
        "# Popular claims, with our figures",
        "",
        "Written by `python -m benches.plan_claims` from the planner's closed form; figures are predictions unless",
        f"they are of a trace. The grid is {len(list(cases()))} questions: traffic {', '.join(TRAFFIC)};",
        "Llama-3-8B (BF16), Qwen3-32B and Llama-3-70B (FP8); TPOT targets of 20, 30, 50 and 100 ms; 8 H100; 90 % of",
        "the requests meet both targets. A split is the best of direct hand-off, KV store and mixed fleets; its gain",
        "is over chunked unified workers on the same GPUs. How far the predictions are from measurements:",
        "`python -m benches.plan_fit`; how far from simulation: `python -m benches.plan_agreement`.",
        "",
        "| Claim | Our figure | Conditions | Verdict |",
        "|---|---|---|---|",
        *(f"| {c.rule} | {c.found} | {c.conditions} | {c.verdict} |" for c in claims),
    ]
    return "\n".join(lines) + "\n"


def ratio(grid: Sequence[tuple[Case, Choice]]) -> Claim:
    """The ratio is 1:2."""
    shares = sorted(_prefill_share(c.split[0]) for _, c in grid if c.split)
    near = sum(abs(share - 1 / 3) < 1 / 16 for share in shares)
    by_traffic = {}
    for case, choice in grid:
        if choice.split:
            by_traffic.setdefault(case.traffic, []).append(_prefill_share(choice.split[0]))
    medians = ", ".join(f"{t} {percentile(sorted(s), 0.5):.0%}" for t, s in by_traffic.items())
    return Claim(
        rule="Prefill to decode is 1:2",
        found=(
            f"prefill takes {shares[0]:.0%} to {shares[-1]:.0%} of the GPUs, a third in {near} of {len(shares)} best "
            f"splits; medians: {medians}"
        ),
        conditions="best split of each question on the grid",
        verdict=_verdict(near >= MOSTLY * len(shares), "the ratio follows input and output lengths and the targets"),
    )


def ratio_across_nodes() -> Claim:
    """Across nodes it is 1:3."""
    same, total, losses = 0, 0, []
    for traffic in ("chat", "rag", "agent"):
        for model in ("llama-3-8b", "llama-3-70b"):
            near = answer(Case(traffic=traffic, model=model, tpot_ms=30, network="nvlink"))[0]
            far = answer(Case(traffic=traffic, model=model, tpot_ms=30, network="200Gb"))[0]
            if near.split and far.split:
                total += 1
                same += _prefill_share(near.split[0]) == _prefill_share(far.split[0])
                losses.append(1 - far.split[1] / near.split[1])
    return Claim(
        rule="Across nodes it is 1:3",
        found=(
            f"the best split is the same over NVLink and over one 200 Gb/s card per worker in {same} of {total} cases; "
            f"the card costs up to {max(losses):.0%} of the goodput"
        ),
        conditions="chat, RAG and agent traffic; 8B and 70B; TPOT 30 ms",
        verdict=_verdict(same < MOSTLY * total, "service rates set the ratio; the link only has to keep up"),
    )


def small_models() -> Claim:
    """Never split under 7B."""
    rows, small = [], []
    for model in ("qwen3-1.7b", "llama-3-8b", "qwen3-32b", "llama-3-70b"):
        choices = [answer(Case(traffic="rag", model=model, tpot_ms=t))[0] for t in (5.0, 10.0, 20.0, 50.0)]
        rows.append(f"{model} {' / '.join(_gain_of(c) for c in choices)}")
        if model == "qwen3-1.7b":
            small = [c.goodput_gain for c in choices if c.split]
    return Claim(
        rule="Never split models under 7B",
        found="; ".join(rows),
        conditions="RAG traffic, TPOT 5 / 10 / 20 / 50 ms, 8 H100",
        verdict=_verdict(
            max(small, default=0.0) < WORTH, "what counts is the TPOT target against the model's own step time"
        ),
    )


def rates() -> Claim:
    """Not below 100, surely above 500 requests per second."""
    rows, below, above = [], [], []
    for model, tpot_ms in (("llama-3-8b", 15.0), ("llama-3-70b", 30.0)):
        seen = []
        for fleet in FLEETS:
            choice = answer(Case(traffic="chat", model=model, tpot_ms=tpot_ms, gpus=fleet))[0]
            if choice.split and choice.unified:
                seen.append(f"{choice.split[1]:.0f}/s {_gain_of(choice)}")
                (below if choice.split[1] < 100 else above).append(choice.goodput_gain)
        rows.append(f"{model} at {tpot_ms:g} ms: {', '.join(seen)}")
    return Claim(
        rule="Do not split below 100 requests/s, split above 500",
        found="; ".join(rows),
        conditions=f"chat traffic on {', '.join(FLEETS)}; the rate each fleet then serves and its gain",
        verdict=_verdict(
            max(below, default=0.0) < WORTH <= min(above, default=0.0),
            "model and targets decide; the rate little, once a fleet has a few workers per role",
        ),
    )


def short_prompts() -> Claim:
    """90 % of prompts are under 512 tokens."""
    shares = [(read_trace(DATA / name), name) for name in TRACES]
    found = [(portray(load).short_share, name.split(".")[0]) for load, name in shares]
    text = ", ".join(f"{share:.0%} ({name})" for share, name in found)
    return Claim(
        rule="90 % of prompts are under 512 tokens",
        found=text,
        conditions="three public one-hour traces; prompts of at most 512 tokens",
        verdict=_verdict(min(share for share, _ in found) >= 0.9, f"at most {max(s for s, _ in found):.0%}"),
    )


def tails() -> Claim:
    """P99 falls by 15 to 30 times."""
    rows, ratios = [], []
    for traffic in ("chat", "rag", "agent"):
        case = Case(traffic=traffic, model="llama-3-70b", tpot_ms=30)
        choice, setting, traffics = answer(case)
        if not choice.unified or not choice.split:
            continue
        rate = 0.9 * min(capacity_rps(s[0], traffics, setting) for s in (choice.unified, choice.split))
        one, two = (expected_of(load_of(s[0], rate, traffics, setting), rate) for s in (choice.unified, choice.split))
        first, step = one.ttft_ms.p99 / two.ttft_ms.p99, one.tpot_ms.p99 / two.tpot_ms.p99
        ratios += [first, step]
        rows.append(f"{traffic}: TTFT {first:.1f} x, TPOT {step:.1f} x")
    return Claim(
        rule="P99 falls by 15 to 30 times",
        found="; ".join(rows),
        conditions="Llama-3-70B FP8 on 8 H100, TPOT 30 ms, both fleets at 90 % of the lesser one's capacity",
        verdict=_verdict(max(ratios) >= 15, f"at most {max(ratios):.1f} times against chunked prefill"),
    )


def heterogeneous(grid: Sequence[tuple[Case, Choice]]) -> Claim:
    """Two kinds of GPU bring 30 %."""
    found = []
    for case, _ in grid:
        if case.model == "llama-3-70b" and case.tpot_ms in (30.0, 50.0):
            choice = answer(case, alternatives=OTHERS)[0]
            best = max((o.capacity_rps for o in choice.options if o.name.startswith("decode on")), default=0.0)
            name = next((o.name for o in choice.options if o.capacity_rps == best), "")
            if choice.split and best:
                found.append((best / choice.split[1] - 1, f"{case.traffic} {case.tpot_ms:g} ms: {name}"))
    found.sort()
    return Claim(
        rule="Other GPUs for decode bring 30 %",
        found=(
            f"{found[0][0]:+.0%} to {found[-1][0]:+.0%} goodput over the split on H100 alone; median "
            f"{percentile([g for g, _ in found], 0.5):+.0%}; best {found[-1][1]}"
        ),
        conditions="Llama-3-70B FP8, TPOT 30 and 50 ms, equal price per hour at the catalogue's dated prices",
        verdict=_verdict(percentile([g for g, _ in found], 0.5) >= WORTH, "it depends on prices and traffic"),
    )


def gains(grid: Sequence[tuple[Case, Choice]]) -> Claim:
    """Two to three times the tokens at half the cost."""
    own = sorted(c.goodput_gain for _, c in grid if c.split and c.unified and not math.isinf(c.goodput_gain))
    saved = [1 - 1 / (1 + g) for g in own]  # GPUs saved at equal rate and attainment, many workers assumed
    worth = sum(g >= WORTH for g in own)
    return Claim(
        rule="Two to three times the tokens at 30 to 50 % less cost",
        found=(
            f"goodput {own[0]:+.0%} to {own[-1]:+.0%}, median {percentile(own, 0.5):+.0%}; at least +30 % in {worth} "
            f"of {len(own)} questions; GPUs saved at equal rate {saved[0]:.0%} to {saved[-1]:.0%}, median "
            f"{percentile(saved, 0.5):.0%}"
        ),
        conditions="the grid",
        verdict=_verdict(percentile(own, 0.5) >= 1.0, "that is the exception, at tight TPOT targets"),
    )


def loose_targets(grid: Sequence[tuple[Case, Choice]]) -> Claim:
    """Tight TPOT favours the split (DistServe, TaiChi)."""
    split_at: Counter[float] = Counter()
    total: Counter[float] = Counter()
    for case, choice in grid:
        if choice.split and choice.unified:
            total[case.tpot_ms] += 1
            split_at[case.tpot_ms] += choice.goodput_gain >= WORTH
    text = ", ".join(f"{split_at[t]} of {total[t]} at {t:g} ms" for t in sorted(total))
    return Claim(
        rule="A tight TPOT favours a split, a tight TTFT unified workers",
        found=f"a split gains 30 %: {text}",
        conditions="the grid, by TPOT target",
        verdict=_verdict(
            all(split_at[a] / total[a] >= split_at[b] / total[b] for a, b in pairwise(sorted(total))), "not here"
        ),
    )


def offline() -> Claim:
    """Batch work gains from a split too."""
    case = Case(traffic="chat", model="llama-3-70b", tpot_ms=1e6, ttft_factor=1e6)
    choice = answer(case)[0]
    return Claim(
        rule="Splitting raises throughput of offline work",
        found=f"{_gain_of(choice)} without latency targets",
        conditions="chat traffic, Llama-3-70B FP8, 8 H100, targets so loose that only memory and time bind",
        verdict=_verdict(choice.goodput_gain >= WORTH, "do not split"),
    )


def transfer() -> Claim:
    """The KV transfer takes half as long as people think, or twice."""
    shape, gpu = find_model("llama-3-70b").shape, accelerators()["H100"]
    size = shape.kv_bytes_per_token()

    def ms(bytes_per_s: float) -> float:
        return TransferCost(fixed_ms=0, bytes_per_ms=bytes_per_s / 1000, kv_bytes_per_token=size).ms(4096)

    return Claim(
        rule="NVLink moves the KV cache of 4,096 tokens of a 70B model in 1.5 ms",
        found=(
            f"{4096 * size / 1e9:.3f} GB: {ms(gpu.node_bytes_per_s):.2f} ms over one GPU's NVLink in one direction, "
            f"{ms(25e9):.1f} ms over one 200 Gb/s card at line rate, {ms(137e9):.1f} ms at 137 GB/s (eight, measured)"
        ),
        conditions="Llama-3-70B, 16-bit cache, 327,680 bytes a token",
        verdict=_verdict(ms(gpu.node_bytes_per_s) < 2, "900 GB/s counts both directions"),
    )


def _prefill_share(shape: Shape) -> float:
    """Share of the split's GPUs that prefill."""
    assert shape.prefill_worker is not None
    assert shape.decode_worker is not None
    prefill = shape.prefill * shape.prefill_worker.use.gpus
    return prefill / (prefill + shape.decode * shape.decode_worker.use.gpus)


def _gain_of(choice: Choice) -> str:
    if choice.split is None:
        return "no split keeps the targets"
    if choice.unified is None:
        return "only a split keeps the targets"
    return f"{choice.goodput_gain:+.0%}"


def _verdict(holds: bool, otherwise: str) -> str:  # noqa: FBT001 - reads as a sentence
    return "Holds in these cases" if holds else f"Does not hold: {otherwise}"


if __name__ == "__main__":
    main()
