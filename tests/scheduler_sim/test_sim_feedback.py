"""What feedback learns in overload, in whole simulations: it stands still while requests are refused."""

import msgspec

from benches.bar_loads import PROMPTS, TARGET
from scheduler.policy.demand import Forecast
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Move
from scheduler.policy.sight import RatioLimits
from scheduler.simulator.arrivals import poisson
from scheduler.simulator.pilot import AutoPilot, FleetSight
from scheduler.simulator.setup import H100_8B, Setup
from scheduler.simulator.simulation import Simulation

HALF = msgspec.structs.replace(
    H100_8B, prefill=msgspec.structs.replace(H100_8B.prefill, per_token_ms=H100_8B.prefill.per_token_ms * 0.6)
)


class Watched(AutoPilot):
    """Keeps what the prefill gain was at each tick, and whether anybody had been refused."""

    def __init__(self, limits: RatioLimits) -> None:
        super().__init__(Fleet(latency=HALF, target=TARGET), limits)
        self.gains: list[tuple[bool, float]] = []

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:
        move = super().tick(now_s, sight, forecast)
        self.gains.append((bool(self._blamed.blamed(now_s).refused), self.state.prefill_gain))
        return move


def overloaded(limits: RatioLimits) -> Watched:
    """Play prompts for seven of eight workers, whose costs are believed to be little more than half."""
    pilot = Watched(limits)
    setup = Setup(split=Split(prefill=4, decode=4), target=TARGET, believed=HALF, seed=2)
    load = msgspec.structs.replace(PROMPTS, rate_rps=30.0)
    Simulation(setup, pilot).run(poisson(load, duration_s=160, seed=5))
    return pilot


def test_in_overload_the_gain_has_learned_before_the_first_request_is_refused():
    """Refusals come a deadline after the misses, so what stands still from then on has turned already."""
    pilot = overloaded(RatioLimits())
    before = [gain for refused, gain in pilot.gains if not refused]
    after = [gain for refused, gain in pilot.gains if refused]
    assert after, "nobody was refused"
    assert max(before) > 1.1
    assert max(after) <= max(before)
    free = overloaded(RatioLimits(max_refused_share=1.0))
    assert [d.move for _, d in free.log if d.move] == [d.move for _, d in pilot.log if d.move]
