"""Workers that a model and its GPUs allow, and the latency model of each."""

import re

import msgspec

from contracts.perf import LatencyModel
from contracts.roofline import (
    Accelerator,
    Deployment,
    Efficiency,
    ExpertLoad,
    ModelShape,
    kv_capacity_tokens,
    latency_model,
)
from contracts.slo import SloTarget
from pdgate.plan.experts import LARGEST_GROUP, SMALLEST_GROUP, Hits, decode_rates, expert_load
from pdgate.plan.pools import decode_capacity_rps, decode_step_ms
from pdgate.plan.speculation import Speculation
from pdgate.plan.traffic import DecodeMoments
from pdgate.plan.workload import WorkloadError

MIN_CONTEXTS = 4.0  # a worker must hold at least so many mean requests
MAX_RUNNING, MAX_PER_RANK = 1024, 256  # requests at once: of a worker, and of each attention rank of a large one
NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(G[bB])(?:/?s|ps)?")
GIGA = 1e9


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of worker: GPUs, how they hold the model, and what it costs in time and money."""

    gpu: Accelerator
    use: Deployment
    latency: LatencyModel

    @property
    def price_per_hour(self) -> float:
        """Price of the worker's GPUs."""
        return self.use.gpus * self.gpu.price_per_hour

    @property
    def label(self) -> str:
        """As people write it: "TP4", "TP8 DP8", "EP16" (experts apart, attention data parallel)."""
        if self.use.experts.apart:
            return f"EP{self.use.gpus}"
        ranks = f" DP{self.use.attention_dp}" if self.use.attention_dp > 1 else ""
        return f"TP{self.use.gpus}{ranks}"


class FitErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Mean errors of the latency model, 0.1 = 10 %: of the shipped factors on systems they never saw."""

    prefill: float = 0.24
    decode: float = 0.168


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers of a comparison share."""

    shape: ModelShape
    fit: Efficiency
    weights: str
    kv: str
    engine: str
    target: SloTarget
    moments: DecodeMoments
    network: str = ""  # "nvlink", "200Gb", "25GB"; empty = NVLink within one node, else the GPUs' network cards
    speed_prefill: float = 1.0  # factor on prefill times, for sensitivity
    speed_decode: float = 1.0
    attainment: float = 0.9
    mixing: float = 1.1  # kappa: cost of a prompt mixed into decode steps over its cost alone
    chunk_tokens: int | None = None  # of a mixed step; None = prompts are cut so that a step keeps the TPOT target
    speculation: Speculation | None = None
    expert_parallel: bool = True  # whether mixtures may be served with whole experts on each GPU
    expert_copies: int = 0  # additional copies of the most hit experts per layer
    hits: Hits = Hits()  # recorded; none = all experts alike
    errors: FitErrors = FitErrors()  # what the range of the gain is computed with


def runs_on(engine: str, gpu: Accelerator) -> bool:
    """Return whether an engine runs on an accelerator: TensorRT-LLM only on those of its own maker."""
    return engine != "trtllm" or gpu.maker == "NVIDIA"


def workers_of(gpu: Accelerator, count: int, setting: Setting) -> list[Worker]:
    """Return every kind of worker that fits on so many GPUs of one kind, smallest first."""
    found = []
    gpus = 1
    while gpus <= min(count, gpu.gpus_per_node):
        layouts = {1, gpus} if setting.shape.latent_rank else {1}
        for ranks in sorted(layouts):
            cut = ExpertLoad(decode_rates=decode_rates(setting.hits, setting.shape))
            use = Deployment(gpus=gpus, attention_dp=ranks, weights=setting.weights, kv=setting.kv, experts=cut)
            if kv_capacity_tokens(setting.shape, gpu, use) >= MIN_CONTEXTS * setting.moments.prompt:
                found.append(_worker(gpu, use, count, setting))
        gpus *= 2
    return found + _expert_workers(gpu, count, setting)


def _expert_workers(gpu: Accelerator, count: int, setting: Setting) -> list[Worker]:
    """Workers with whole experts on each GPU and data-parallel attention, over nodes too."""
    found: list[Worker] = []
    if not setting.shape.experts or not setting.expert_parallel:
        return found
    gpus = SMALLEST_GROUP
    while gpus <= min(count, LARGEST_GROUP, setting.shape.experts):
        load = expert_load(setting.hits, setting.shape, gpus, copies=setting.expert_copies)
        use = Deployment(gpus=gpus, attention_dp=gpus, weights=setting.weights, kv=setting.kv, experts=load)
        # a request's cache lies on one GPU, which must hold a few of them
        if kv_capacity_tokens(setting.shape, gpu, use) >= MIN_CONTEXTS * setting.moments.prompt * gpus:
            found.append(_worker(gpu, use, count, setting))
        gpus *= 2
    return found


def line_rate(network: str, gpu: Accelerator, use: Deployment, count: int) -> float:
    """Return the bytes per second of one worker's hand-off link, one direction.

    Raises:
        WorkloadError: `network` is neither "nvlink" nor a rate such as 200Gb or 25GB.
    """
    if network.lower() == "nvlink" or (not network and count <= gpu.gpus_per_node):
        return gpu.node_bytes_per_s * use.gpus
    if not network:
        return gpu.network_bytes_per_s * use.gpus
    match = NETWORK.fullmatch(network)
    if match is None:
        raise WorkloadError(f"--network: {network!r} is neither nvlink nor a rate per worker such as 200Gb or 25GB")
    return float(match[1]) * GIGA / (8 if match[2] == "Gb" else 1)


def _worker(gpu: Accelerator, use: Deployment, count: int, setting: Setting) -> Worker:
    """A worker whose decode step is made linear around the batch it runs at its capacity."""
    link = line_rate(setting.network, gpu, use, count)
    batch = 32.0
    drafts = setting.speculation
    most = max(MAX_RUNNING, MAX_PER_RANK * use.attention_dp)
    for _ in range(3):
        latency = latency_model(
            setting.shape,
            gpu,
            use,
            setting.fit,
            at_requests=batch * (drafts.positions if drafts else 1),
            link_bytes_per_s=link,
            engine=setting.engine,
        )
        decode = drafts.per_token(latency.decode) if drafts else latency.decode
        latency = msgspec.structs.replace(latency, decode=decode, max_running=most)
        rate = decode_capacity_rps(latency, setting.moments, setting.target.tpot_ms)
        step = decode_step_ms(latency, setting.moments, rate)
        batch = min(float(most), max(2.0, rate / 1000 * step * setting.moments.o))
    latency = _scaled(latency, setting)
    front_ms = latency.front_ms + _unloaded_ms(latency, setting)
    return Worker(gpu=gpu, use=use, latency=msgspec.structs.replace(latency, front_ms=front_ms))


def _unloaded_ms(latency: LatencyModel, setting: Setting) -> float:
    """What an unloaded prompt of mean length takes longer than it takes of a busy worker's time."""
    prefill, tokens = latency.prefill, round(setting.moments.prompt - setting.moments.o)
    return (1 / setting.fit.work(setting.shape) - 1) * (prefill.ms(tokens) - prefill.fixed_ms)


def _scaled(latency: LatencyModel, setting: Setting) -> LatencyModel:
    prefill, decode = latency.prefill, latency.decode
    p, d = setting.speed_prefill, setting.speed_decode
    return msgspec.structs.replace(
        latency,
        prefill=msgspec.structs.replace(
            prefill,
            fixed_ms=prefill.fixed_ms * p,
            per_token_ms=prefill.per_token_ms * p,
            per_token_pair_ms=prefill.per_token_pair_ms * p,
        ),
        decode=msgspec.structs.replace(
            decode,
            fixed_ms=decode.fixed_ms * d,
            per_request_ms=decode.per_request_ms * d,
            per_kv_token_ms=decode.per_kv_token_ms * d,
        ),
    )
