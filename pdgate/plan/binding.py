"""The resource that runs out first."""

from collections.abc import Mapping, Sequence

from pdgate.plan.fleet import Setting, Worker
from pdgate.plan.options import load_of
from pdgate.plan.pools import prompt_ms
from pdgate.plan.shapes import Kind, Shape
from pdgate.plan.traffic import Traffic, Traffics
from pdgate.plan.workload import mean


def binding_of(
    workers: Sequence[list[Worker]],
    traffics: Traffics,
    setting: Setting,
    found: Mapping[Kind, tuple[Shape, float] | None],
) -> str:
    """Return what runs out first, in words.

    Args:
        workers: kinds of worker of each kind of GPU.
        traffics: the workload.
        setting: model and targets.
        found: the best shape of each kind and its capacity.
    """
    kinds = [w for group in workers for w in group]
    if not kinds:
        return "GPU memory: the model does not fit with room for a few requests"
    tau, limit = setting.target.tpot_ms, setting.target.ttft_ms
    step = min(w.latency.decode.step_ms(1, round(traffics.moments.kv / traffics.moments.o)) for w in kinds)
    if tau is not None and step > tau:
        return (
            f"memory bandwidth: a decode step of one request takes {step:.1f} ms alone, the TPOT target is {tau:g} ms"
        )
    traffic = traffics.whole(None)
    if limit is not None:
        late = min(_late_share(w, traffic, limit) for w in kinds)
        if late > 1 - setting.attainment:
            return (
                f"prefill compute: {late:.0%} of the prompts take longer than the TTFT target of {limit:g} ms on an "
                "idle worker"
            )
    widest = max((f for f in found.values() if f), key=lambda f: f[1], default=None)
    if widest is None:
        return "GPUs: too few workers for the traffic's burstiness at any rate"
    load = load_of(widest[0], widest[1], traffics, setting)
    outcome = load.split or load.unified
    assert outcome is not None
    shares = {
        "prefill compute (TTFT)": outcome.first.busy,
        "decode time (TPOT)": outcome.decode_busy,
        "KV memory of the decode workers": outcome.step.kv_tokens / max(1, outcome.step.kv_capacity_tokens),
        "the KV transfer link": outcome.link_busy,
    }
    return max(shares, key=lambda name: shares[name])


def _late_share(worker: Worker, traffic: Traffic, limit_ms: float) -> float:
    """Share of prompts that miss the TTFT target on an idle worker: structural, no fleet helps."""
    times = prompt_ms(worker.latency, traffic)
    return mean([float(worker.latency.front_ms + t > limit_ms) for t in times])
