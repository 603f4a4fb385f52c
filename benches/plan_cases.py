"""The questions that the planner's own benches ask: traffic, model and targets over a grid."""

from collections.abc import Iterator

import msgspec

from contracts.slo import SloTarget
from pdgate.plan.compare import Ask
from pdgate.plan.decide import Choice, decide
from pdgate.plan.described import Description, sample
from pdgate.plan.fit import fitted
from pdgate.plan.fleet import Setting
from pdgate.plan.hardware import accelerators, parse_gpus
from pdgate.plan.models import find_model
from pdgate.plan.traffic import Traffics
from pdgate.plan.workload import Workload

TRAFFIC = {
    "chat": Description(rate_rps=1, prompt_tokens=1155, output_tokens=211, prompt_cv=0.96, output_cv=0.77),
    "code": Description(rate_rps=1, prompt_tokens=2048, output_tokens=28, prompt_cv=0.96, output_cv=2.1),
    "rag": Description(rate_rps=1, prompt_tokens=6000, output_tokens=300, prompt_cv=0.5, prefix_reuse=0.2),
    "agent": Description(rate_rps=1, prompt_tokens=12_000, output_tokens=343, prompt_cv=1.3, prefix_reuse=0.37),
    "reasoning": Description(rate_rps=1, prompt_tokens=550, output_tokens=1300, output_cv=0.8),
}
TTFT_MS = {"chat": 1000.0, "code": 1500.0, "rag": 2000.0, "agent": 6000.0, "reasoning": 1000.0}
MODELS = {"llama-3-8b": "bf16", "qwen3-32b": "fp8", "llama-3-70b": "fp8"}
TPOT_MS = (20.0, 30.0, 50.0, 100.0)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One question on 8 H100."""

    traffic: str
    model: str
    tpot_ms: float
    gpus: str = "8xH100"
    network: str = ""
    ttft_factor: float = 1.0

    @property
    def target(self) -> SloTarget:
        """Its targets."""
        return SloTarget(ttft_ms=TTFT_MS[self.traffic] * self.ttft_factor, tpot_ms=self.tpot_ms)


def cases() -> Iterator[Case]:
    """Return the grid: 60 questions."""
    for traffic in TRAFFIC:
        for model in MODELS:
            for tpot_ms in TPOT_MS:
                yield Case(traffic=traffic, model=model, tpot_ms=tpot_ms)


def setting_of(case: Case, workload: Workload) -> tuple[Setting, Traffics]:
    """Return what the planner needs for a case."""
    traffics = Traffics(workload, case.target)
    setting = Setting(
        shape=find_model(case.model).shape,
        fit=fitted(),
        weights=MODELS.get(case.model, "bf16"),
        kv="bf16",
        engine="sglang",
        target=case.target,
        moments=traffics.moments,
        network=case.network,
    )
    return setting, traffics


def workload_of(case: Case, *, requests: int = 1500, seed: int = 1) -> Workload:
    """Return the case's traffic."""
    described = msgspec.structs.replace(TRAFFIC[case.traffic], sample=requests, seed=seed)
    return sample(described, name=case.traffic)


def answer(case: Case, *, requests: int = 1500, alternatives: tuple[str, ...] = ()) -> tuple[Choice, Setting, Traffics]:
    """Return the planner's decision for a case; the fleet's own limit decides, not a rate."""
    known = accelerators()
    workload = workload_of(case, requests=requests).at_rate(0.5)
    setting, traffics = setting_of(case, workload)
    ask = Ask(fleet=tuple(parse_gpus(case.gpus, known)), alternatives=tuple(known[name] for name in alternatives))
    return decide(ask, traffics, setting), setting, traffics
