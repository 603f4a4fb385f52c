"""What the user asks of a plan."""

import msgspec

from contracts.roofline import Accelerator, Efficiency, ModelShape
from contracts.slo import SloTarget
from pdgate.plan.calibration import Calibration
from pdgate.plan.compare import LocalModel
from pdgate.plan.experts import Hits
from pdgate.plan.money import Prices
from pdgate.plan.speculation import Speculation
from pdgate.plan.workload import Workload


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks."""

    workload: Workload
    shape: ModelShape
    weights: str
    fit: Efficiency
    fleet: tuple[tuple[int, Accelerator], ...]
    target: SloTarget
    kv: str = "bf16"
    engine: str = "sglang"
    attainment: float = 0.9  # 0 to 1
    network: str = ""
    mixing: float = 1.1
    peak: float = 1.0  # rate of the busiest hour over the mean; the fleet is sized for it
    growth: float = 1.0  # factor on the traffic until the plan is reviewed
    currency: str = "USD"
    network_per_hour: float = 0.0
    operations_per_hour: float = 0.0
    prices: Prices | None = None
    alternatives: tuple[Accelerator, ...] = ()
    local: LocalModel | None = None
    speculation: Speculation | None = None
    expert_parallel: bool = True
    expert_copies: int = 0
    hits: Hits = Hits()
    calibration: Calibration | None = None  # how well `fit` explains the user's measurements; None = not calibrated
