"""Workers that a model and its GPUs allow, and the latency model of each."""

import re

import msgspec

from contracts.perf import LatencyModel
from contracts.roofline import Accelerator, Deployment, Efficiency, ModelShape, kv_capacity_tokens, latency_model
from contracts.slo import SloTarget
from pdgate.plan.pools import decode_capacity_rps, decode_step_ms
from pdgate.plan.speculation import Speculation
from pdgate.plan.traffic import DecodeMoments
from pdgate.plan.workload import WorkloadError

MIN_CONTEXTS = 4.0  # a worker must hold at least so many mean requests
MAX_RUNNING = 1024
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
        """As people write it: "TP4", "TP8 DP8"."""
        ranks = f" DP{self.use.attention_dp}" if self.use.attention_dp > 1 else ""
        return f"TP{self.use.gpus}{ranks}"


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
    speculation: Speculation | None = None


def workers_of(gpu: Accelerator, count: int, setting: Setting) -> list[Worker]:
    """Return every kind of worker that fits on so many GPUs of one kind, smallest first."""
    found = []
    gpus = 1
    while gpus <= min(count, gpu.gpus_per_node):
        layouts = {1, gpus} if setting.shape.latent_rank else {1}
        for ranks in sorted(layouts):
            use = Deployment(gpus=gpus, attention_dp=ranks, weights=setting.weights, kv=setting.kv)
            if kv_capacity_tokens(setting.shape, gpu, use) >= MIN_CONTEXTS * setting.moments.prompt:
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
        latency = msgspec.structs.replace(latency, decode=decode, max_running=MAX_RUNNING)
        rate = decode_capacity_rps(latency, setting.moments, setting.target.tpot_ms)
        step = decode_step_ms(latency, setting.moments, rate)
        batch = min(float(MAX_RUNNING), max(2.0, rate / 1000 * step * setting.moments.o))
    return Worker(gpu=gpu, use=use, latency=_scaled(latency, setting))


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
