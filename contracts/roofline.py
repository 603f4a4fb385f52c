"""What an accelerator could do at best, and the fitted factors between that and what it does. Pure.

A model's step is split into terms, each the time at 100 % of one hardware limit (weights and KV over memory
bandwidth, arithmetic over peak FLOP/s, all-reduces over the links). Fitted factors (`Efficiency`) turn the terms into
predicted times, and `latency_model` condenses them into the coefficients of `contracts.perf`.

Memory in bytes, bandwidth in bytes per second and one direction, arithmetic in FLOP per second without sparsity.
"""

import math
from collections.abc import Mapping

import msgspec

from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost

MS = 1000.0
DTYPE_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.53}
"""Bytes per weight; the 4-bit formats include their block scales."""
RESERVED_BYTES = 3_500_000_000  # per GPU: runtime, communication buffers, CUDA graphs
USABLE_MEMORY = 0.9  # share of a GPU's memory an engine takes


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a transformer that decide its cost."""

    name: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # inner size of the dense feed-forward layers; 0 = none
    dense_layers: int  # feed-forward layers that are dense
    experts: int = 0  # routed experts of a mixture layer
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # inner size of the shared experts together
    latent_rank: int = 0  # MLA: compressed KV per token and layer, without the rotary part; 0 = plain attention
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    query_rank: int = 0
    full_attention_layers: int = 0  # layers whose KV grows with the context; 0 = all
    linear_layer_weights: int = 0  # weights of one linear-attention layer
    tied_embeddings: bool = False

    @property
    def moe_layers(self) -> int:
        """Mixture-of-experts layers."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def growing_layers(self) -> int:
        """Layers whose KV grows with the context."""
        return self.full_attention_layers or self.layers

    @property
    def attention_weights(self) -> int:
        """Weights of all attention layers."""
        if self.latent_rank:
            queries = self.heads * (self.nope_dim + self.rope_dim)
            rank = self.query_rank
            projected = self.hidden * rank + rank * queries if rank else self.hidden * queries
            latent = self.hidden * (self.latent_rank + self.rope_dim)
            expand = self.latent_rank * self.heads * (self.nope_dim + self.value_dim)
            one = projected + latent + expand + self.heads * self.value_dim * self.hidden
        else:
            one = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        linear = self.linear_layer_weights * (self.layers - self.growing_layers) if self.linear_layer_weights else 0
        return one * (self.growing_layers if linear else self.layers) + linear

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def always_weights(self) -> int:
        """Weights that every token reads: all but the routed experts and the input embedding."""
        dense = self.dense_layers * 3 * self.hidden * self.ffn
        mixture = self.moe_layers * self.hidden * (3 * self.shared_ffn + self.experts)
        return self.attention_weights + dense + mixture + self.vocab * self.hidden

    @property
    def total_weights(self) -> int:
        """All weights."""
        embedding = 0 if self.tied_embeddings else self.vocab * self.hidden
        return self.always_weights + embedding + self.moe_layers * self.experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Weights that compute one token."""
        return self.always_weights + self.moe_layers * self.experts_per_token * self.expert_weights

    @property
    def kv_elements(self) -> int:
        """Cached numbers per token over all growing layers."""
        one = self.latent_rank + self.rope_dim if self.latent_rank else 2 * self.kv_heads * self.head_dim
        return one * self.growing_layers

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Return the bytes of KV cache one token takes, over all layers."""
        return math.ceil(self.kv_elements * (1.0 if dtype in ("fp8", "int8") else 2.0))

    @property
    def pair_flops(self) -> int:
        """FLOP per (query, key) pair of prefill attention, over all growing layers."""
        if self.latent_rank:
            return 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim) * self.growing_layers
        return 4 * self.heads * self.head_dim * self.growing_layers

    @property
    def latent_pair_flops(self) -> int:
        """FLOP per (new token, cached token) pair of MLA decode in its absorbed form; 0 without MLA."""
        return 2 * self.heads * (2 * self.latent_rank + self.rope_dim) * self.growing_layers if self.latent_rank else 0


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and its links."""

    name: str
    memory_bytes: int
    bytes_per_s: float  # memory bandwidth
    flops: Mapping[str, float]  # dense peak by dtype
    node_bytes_per_s: float  # to the GPUs of its node, one direction
    network_bytes_per_s: float  # its share of the node's network cards, one direction
    gpus_per_node: int = 8
    maker: str = "NVIDIA"
    hands_off: bool = True  # whether engines move KV between workers on it; without that it only serves unified
    price_per_hour: float = 0.0  # of one GPU, in the user's currency
    price_dated: str = ""
    price_note: str = ""
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Return the peak for weights of this dtype: that of the widest format the GPU computes them in."""
        wider = {"fp4": ("fp4", "fp8", "bf16"), "int4": ("bf16",), "fp8": ("fp8", "bf16"), "int8": ("int8", "bf16")}
        return next(self.flops[d] for d in wider.get(dtype, ("bf16",)) if d in self.flops)


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How the routed experts of a mixture are spread over the GPUs of a worker, and how evenly tokens hit them.

    Prefill and decode hit experts differently, so a group laid out for one phase is uneven in the other.
    """

    apart: bool = False  # expert parallel: whole experts per GPU, tokens exchanged all to all; else each expert is cut
    prefill_imbalance: float = 1.0  # expert work of the busiest GPU over the mean, in prefill
    decode_imbalance: float = 1.0
    decode_rates: tuple[float, ...] = ()  # probability that a decoded token picks each expert; empty = all alike


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker holds the model."""

    gpus: int = 1
    attention_dp: int = 1  # data-parallel attention ranks; the rest of `gpus` is tensor parallel
    weights: str = "bf16"
    kv: str = "bf16"
    experts: ExpertLoad = ExpertLoad()

    @property
    def attention_tp(self) -> int:
        """GPUs that share one request's attention."""
        return self.gpus // self.attention_dp


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Times at 100 % of each limit, ms, and the counts that overheads multiply."""

    weights_ms: float = 0.0
    experts_ms: float = 0.0
    kv_ms: float = 0.0
    compute_ms: float = 0.0
    moe_compute_ms: float = 0.0
    attention_ms: float = 0.0
    links_ms: float = 0.0
    layers: int = 0
    moe_hops: float = 0.0  # mixture layers times the doublings of GPUs that exchange tokens in each
    requests: float = 0.0


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted factors: measured time over the roofline's, and fixed times. Written by the planner's fit."""

    # decode
    weights: float
    experts: float
    kv: float
    compute: float
    attention: float
    links: float
    layer_ms: float
    moe_layer_ms: float  # per mixture layer and doubling of the worker's GPUs
    request_ms: float
    mixed_prefill: float  # time a mixed prefill adds to the steps of a closed loop, over an unloaded prompt's
    # prefill
    prefill_dense: float
    prefill_moe: float
    prefill_attention: float
    prefill_weights: float
    prefill_links: float
    front_ms: Mapping[str, float]  # by engine: latency of an unloaded request outside the GPU's work
    # transfer
    transfer_fixed_ms: float
    transfer_share: float  # 0 to 1 of the line rate
    # time that a prompt's tokens take of a busy worker, over the same of an unloaded prompt's TTFT
    work_dense: float = 1.0
    work_moe: float = 1.0

    def work(self, shape: ModelShape) -> float:
        """Return the share (0 to 1) of an unloaded prompt's time, weights aside, that takes a worker's capacity."""
        return min(1.0, self.work_moe if shape.experts else self.work_dense)


def decode_terms(shape: ModelShape, gpu: Accelerator, use: Deployment, *, requests: float, kv_tokens: float) -> Terms:
    """Return the terms of one decode step of a worker.

    Args:
        shape: the model.
        gpu: the accelerator.
        use: how the worker holds the model.
        requests: running requests of the whole worker.
        kv_tokens: resident KV tokens of the whole worker.
    """
    attention_bytes, expert_bytes = _weight_bytes(use.weights)
    experts = 0.0
    if shape.experts:
        touched = touched_experts(shape, requests, use.experts.decode_rates) * use.experts.decode_imbalance
        experts = shape.moe_layers * shape.expert_weights * touched * expert_bytes / use.gpus
    return Terms(
        weights_ms=shape.always_weights * attention_bytes / use.attention_tp / gpu.bytes_per_s * MS,
        experts_ms=experts / gpu.bytes_per_s * MS,
        kv_ms=kv_tokens * kv_bytes_per_gpu_token(shape, use) / gpu.bytes_per_s * MS,
        compute_ms=2 * shape.active_weights * requests / (use.gpus * gpu.peak(use.weights)) * MS,
        attention_ms=kv_tokens * shape.latent_pair_flops / use.gpus / gpu.peak("bf16") * MS,
        links_ms=links_ms(shape, gpu, use, requests),
        layers=shape.layers,
        moe_hops=shape.moe_layers * math.log2(use.gpus),
        requests=requests,
    )


def prefill_terms(
    shape: ModelShape, gpu: Accelerator, use: Deployment, *, uncached_tokens: float, cached_tokens: float = 0.0
) -> Terms:
    """Return the terms of one prompt's prefill on a whole worker."""
    n, h = uncached_tokens, cached_tokens
    gemm_ms = 2 * shape.active_weights * n / (use.gpus * gpu.peak(use.weights)) * MS
    pairs = n * n / 2 + h * n
    return Terms(
        weights_ms=shape.total_weights * DTYPE_BYTES[use.weights] / use.gpus / gpu.bytes_per_s * MS,
        compute_ms=0.0 if shape.experts else gemm_ms,
        moe_compute_ms=gemm_ms * use.experts.prefill_imbalance if shape.experts else 0.0,
        attention_ms=shape.pair_flops * pairs / use.gpus / gpu.peak("bf16") * MS,
        links_ms=links_ms(shape, gpu, use, n),
    )


def decode_ms(terms: Terms, fit: Efficiency) -> float:
    """Return the predicted time of one decode step, ms."""
    return (
        fit.weights * terms.weights_ms
        + fit.experts * terms.experts_ms
        + fit.kv * terms.kv_ms
        + fit.compute * terms.compute_ms
        + fit.attention * terms.attention_ms
        + fit.links * terms.links_ms
        + fit.layer_ms * terms.layers
        + fit.moe_layer_ms * terms.moe_hops
        + fit.request_ms * terms.requests
    )


def prefill_ms(terms: Terms, fit: Efficiency) -> float:
    """Return the predicted compute time of one prompt, ms; without the engine's front latency."""
    return (
        fit.prefill_weights * terms.weights_ms
        + fit.prefill_dense * terms.compute_ms
        + fit.prefill_moe * terms.moe_compute_ms
        + fit.prefill_attention * terms.attention_ms
        + fit.prefill_links * terms.links_ms
    )


def kv_bytes_per_gpu_token(shape: ModelShape, use: Deployment) -> float:
    """Return the bytes that one resident token of the worker takes on each GPU, on average.

    Plain attention is sharded over at most `kv_heads` GPUs; MLA's latent is copied to every tensor-parallel rank.
    """
    shards = 1 if shape.latent_rank else min(use.attention_tp, shape.kv_heads)
    return shape.kv_bytes_per_token(use.kv) / (shards * use.attention_dp)


def weight_bytes_per_gpu(shape: ModelShape, use: Deployment) -> float:
    """Return the bytes of weights on each GPU."""
    attention_bytes, expert_bytes = _weight_bytes(use.weights)
    routed = shape.moe_layers * shape.experts * shape.expert_weights
    rest = shape.total_weights - routed
    return routed * expert_bytes / use.gpus + rest * attention_bytes / use.attention_tp


def kv_capacity_tokens(shape: ModelShape, gpu: Accelerator, use: Deployment) -> int:
    """Return how many KV tokens a worker holds; 0 or less: the model does not fit."""
    free = gpu.memory_bytes * USABLE_MEMORY - RESERVED_BYTES - weight_bytes_per_gpu(shape, use)
    return int(free / kv_bytes_per_gpu_token(shape, use))


def latency_model(
    shape: ModelShape,
    gpu: Accelerator,
    use: Deployment,
    fit: Efficiency,
    *,
    at_requests: float,
    link_bytes_per_s: float,
    engine: str = "sglang",
) -> LatencyModel:
    """Return a worker's cost coefficients, made linear around a batch of `at_requests`.

    A prompt's cost is what it takes of a busy worker (`Efficiency.work`): an unloaded one may take longer.
    Exact in everything but the share of experts that a batch touches, which is taken as the chord between half of
    `at_requests` and all of it.

    Args:
        shape: the model.
        gpu: the accelerator.
        use: how the worker holds the model.
        fit: fitted factors.
        at_requests: running requests around which the decode step is made linear.
        link_bytes_per_s: line rate of the KV hand-off between two workers, one direction.
        engine: whose front latency an unloaded request sees.
    """
    high = max(2.0, at_requests)
    low = high / 2
    step_high, step_low = (decode_ms(decode_terms(shape, gpu, use, requests=b, kv_tokens=0), fit) for b in (high, low))
    per_request = (step_high - step_low) / (high - low)
    probe = 1e6
    per_kv = (decode_ms(decode_terms(shape, gpu, use, requests=high, kv_tokens=probe), fit) - step_high) / probe
    one = prefill_terms(shape, gpu, use, uncached_tokens=1)
    linear = msgspec.structs.replace(one, weights_ms=0.0, attention_ms=0.0)
    work = fit.work(shape)
    pair = work * fit.prefill_attention * shape.pair_flops / 2 / use.gpus / gpu.peak("bf16") * MS
    return LatencyModel(
        prefill=PrefillCost(
            fixed_ms=fit.prefill_weights * one.weights_ms,
            per_token_ms=work * prefill_ms(linear, fit),
            per_token_pair_ms=pair,
        ),
        decode=DecodeCost(fixed_ms=step_high - per_request * high, per_request_ms=per_request, per_kv_token_ms=per_kv),
        transfer=TransferCost(
            fixed_ms=fit.transfer_fixed_ms,
            bytes_per_ms=link_bytes_per_s * fit.transfer_share / MS,
            kv_bytes_per_token=shape.kv_bytes_per_token(use.kv),
        ),
        kv_capacity_tokens=max(0, kv_capacity_tokens(shape, gpu, use)),
        front_ms=fit.front_ms.get(engine, 0.0),
    )


def _weight_bytes(dtype: str) -> tuple[float, float]:
    """Bytes per weight of attention and dense parts, and of routed experts: 4-bit checkpoints keep the former wider."""
    expert = DTYPE_BYTES[dtype]
    wider = {"fp4": 1.0, "int4": 2.0}
    return wider.get(dtype, expert), expert


def touched_experts(shape: ModelShape, tokens: float, rates: tuple[float, ...] = ()) -> float:
    """Return how many experts of a layer a step over so many tokens reads, on average.

    Args:
        shape: the model.
        tokens: of the step.
        rates: probability that a token picks each expert; empty = all alike.
    """
    if rates:
        return math.fsum(1 - math.pow(1 - min(1.0, rate), tokens) for rate in rates) * shape.experts / len(rates)
    return shape.experts * (1 - math.pow(1 - shape.experts_per_token / shape.experts, tokens))


def links_ms(shape: ModelShape, gpu: Accelerator, use: Deployment, tokens: float) -> float:
    """Return the time of one step's exchanges at line rate: all-reduces, or all-to-all where experts are apart."""
    return all_to_all_ms(shape, gpu, use, tokens) if use.experts.apart else _all_reduce_ms(shape, gpu, use, tokens)


def all_to_all_ms(shape: ModelShape, gpu: Accelerator, use: Deployment, tokens: float) -> float:
    """Return the time that a worker's mixture layers exchange tokens at line rate, ms.

    A token goes once to each other GPU that holds one of its experts (8 bits a number) and comes back (16 bits).
    Between nodes it crosses the network cards once per node; links within nodes and cards work at the same time.
    """
    gpus, picks = use.gpus, shape.experts_per_token
    if gpus == 1 or not shape.experts:
        return 0.0
    bytes_each = shape.moe_layers * shape.hidden * (1.0 + 2.0)
    per_gpu = tokens / gpus
    others = gpus * (1 - (1 - 1 / gpus) ** picks) * (gpus - 1) / gpus
    nodes = math.ceil(gpus / gpu.gpus_per_node)
    if nodes == 1:
        return per_gpu * others * bytes_each / gpu.node_bytes_per_s * MS
    abroad = nodes * (1 - (1 - 1 / nodes) ** picks) * (nodes - 1) / nodes
    between = per_gpu * abroad * bytes_each / gpu.network_bytes_per_s * MS
    within = per_gpu * others * bytes_each / gpu.node_bytes_per_s * MS
    return max(between, within)


def _all_reduce_ms(shape: ModelShape, gpu: Accelerator, use: Deployment, tokens: float) -> float:
    if use.gpus == 1:
        return 0.0
    sent = 2 * shape.layers * tokens * shape.hidden * 2.0 * (use.gpus - 1) / use.gpus
    return sent / gpu.node_bytes_per_s * MS
