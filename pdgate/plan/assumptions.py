"""What a plan takes for granted, in words."""

from pdgate.plan.compare import NO_HAND_OFF
from pdgate.plan.fleet import FitErrors
from pdgate.plan.measured import MEASURED_ON
from pdgate.plan.question import Question
from pdgate.plan.workload import Workload, mean

FP8_CAVEAT = (
    "an FP8 cache halves KV bytes and changes answers slightly (formats: Micikevicius et al., arXiv 2209.05433; what "
    "coarser caches lose: Liu et al., KIVI, ICML 2024): measure quality on your own tasks before you rely on it"
)
PRICES = "prices:"  # how the assumption about them begins


def assumptions_of(question: Question, workload: Workload) -> list[str]:
    """Return what the plan takes for granted, one sentence each.

    Args:
        question: as asked.
        workload: at the planned rate.
    """
    prices = ", ".join(
        f"{gpu.name} {gpu.price_per_hour:g} {question.currency}/h"
        + (f" ({gpu.price_dated}: {gpu.price_note})" if gpu.price_note else " (yours)")
        for _, gpu in question.fleet
    )
    front_ms = question.fit.front_ms.get(question.engine, 0.0)
    known = [
        f"{PRICES} {prices}",
        f"weights in {question.weights}, KV cache in {question.kv}",
        _trust(question),
        f"engine {question.engine}: {front_ms:.0f} ms of an unloaded request's TTFT are outside the GPU's work",
        f"a prompt mixed into decode steps costs {question.mixing:g} times its cost alone",
        f"{question.attainment:.0%} of the requests meet both targets; TPOT is a request's mean gap",
    ]
    unmeasured = [gpu.name for _, gpu in question.fleet if gpu.name not in MEASURED_ON]
    if unmeasured and question.calibration is None:
        known.append(
            f"no run on {' or '.join(unmeasured)} is among the measurements: its times are the data sheet's times the "
            "factors of other GPUs; three measurements of your own correct them (--measured)"
        )
    if not all(gpu.hands_off for _, gpu in question.fleet):
        known.append(f"{NO_HAND_OFF}, so only unified workers were compared")
    if question.kv == "fp8":
        known.append(FP8_CAVEAT)
    if question.speculation is not None:
        drafts = question.speculation
        known.append(
            f"speculation: {drafts.drafted_tokens} drafted tokens a step, {drafts.acceptance:.0%} of them accepted "
            f"({drafts.tokens_per_step:.2f} tokens a step); drafting and verifying both take decode time; the draft's "
            "memory is not counted"
        )
    if question.peak != 1 or question.growth != 1:
        known.append(
            f"sized for {question.peak:g} x the mean rate of {workload.rate_rps / question.peak:.2f} requests/s; "
            "money at the mean rate"
        )
    if not mean([float(bool(r.blocks) or r.cached_tokens is not None) for r in workload.requests]):
        known.append("the traffic carries no prefix information: no prefix hits are assumed")
    return known


def _trust(question: Question) -> str:
    errors, seen = FitErrors(), question.calibration
    if seen is not None:
        return (
            f"factors moved towards {seen.runs} measurements of yours: TPOT errs by {seen.before:.0%} without them, by "
            f"{seen.after:.0%} on each one from the others"
        )
    return (
        f"factors fitted to public runs: on systems that the fit never saw TPOT errs by {errors.decode:.0%}, the TTFT "
        f"of few requests by {errors.prefill:.0%}; the range of the gain is computed with both"
    )
