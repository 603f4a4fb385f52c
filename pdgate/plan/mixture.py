"""What a plan says of a mixture of experts: how they are spread per phase, and what exchanging tokens costs."""

import msgspec

from contracts.roofline import ModelShape, all_to_all_ms, touched_experts
from pdgate.plan.experts import FLIPS_OFF
from pdgate.plan.fleet import Setting, Worker
from pdgate.plan.shapes import Shape
from pdgate.plan.traffic import Traffic


class PhaseExperts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of one role's workers."""

    role: str
    degree: int  # GPUs that experts are spread over whole; 1 = each expert is cut over the worker's GPUs
    experts_per_gpu: float
    touched_share: float | None  # 0 to 1 of a layer's experts that a decode step reads; None = no decoding here
    imbalance: float  # busiest GPU over the mean, in this role's phase
    exchange_ms: float  # all-to-all of one decode step, or of one mean prompt; 0 = none
    exchange_share: float  # 0 to 1 of that step's or prompt's time


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture's report."""

    roles: list[PhaseExperts]
    recorded_hits: bool  # else all experts are taken to be hit alike
    flips: bool  # whether the scheduler may change a worker's role
    instead: str  # what replaces flips where they are off


def mixture_of(shape: Shape | None, setting: Setting, traffic: Traffic, rate_rps: float) -> Mixture | None:
    """Return the report for the chosen workers; None for a dense model or without workers."""
    if shape is None or not setting.shape.experts:
        return None
    decoding = shape.decode + shape.unified
    roles = [_phase(role, worker, decoding, setting, traffic, rate_rps) for role, worker in shape.roles()]
    apart = any(r.degree > 1 for r in roles)
    return Mixture(
        roles=roles,
        recorded_hits=bool(setting.hits.prefill or setting.hits.decode),
        flips=not apart,
        instead=FLIPS_OFF if apart else "",
    )


def _phase(
    role: str, worker: Worker, decoding: int, setting: Setting, traffic: Traffic, rate_rps: float
) -> PhaseExperts:
    model, use = setting.shape, worker.use
    degree = use.gpus if use.experts.apart else 1
    prompt = traffic.mean_uncached_tokens
    if role == "prefill":
        exchange = _exchange_ms(model, worker, prompt) * setting.fit.prefill_links
        whole = worker.latency.prefill.ms(round(prompt), round(traffic.mean_cached_tokens))
        batch = None
    else:
        cost = worker.latency.decode
        per_ms = rate_rps / 1000 / decoding
        work = cost.per_request_ms * traffic.decode.o + cost.per_kv_token_ms * traffic.decode.kv
        whole = cost.fixed_ms / max(0.05, 1 - per_ms * work)
        batch = max(1.0, per_ms * whole * traffic.decode.o)
        exchange = _exchange_ms(model, worker, batch) * setting.fit.links
    rates = use.experts.decode_rates
    return PhaseExperts(
        role=role,
        degree=degree,
        experts_per_gpu=model.experts / degree + setting.expert_copies / degree,
        touched_share=touched_experts(model, batch, rates) / model.experts if batch is not None else None,
        imbalance=use.experts.prefill_imbalance if role == "prefill" else use.experts.decode_imbalance,
        exchange_ms=exchange,
        exchange_share=min(1.0, exchange / whole) if whole > 0 else 0.0,
    )


def _exchange_ms(model: ModelShape, worker: Worker, tokens: float) -> float:
    """The exchange at line rate; the fitted factor on links comes on top."""
    return all_to_all_ms(model, worker.gpu, worker.use, tokens) if worker.use.experts.apart else 0.0
