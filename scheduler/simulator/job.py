"""One request on its way through the simulated fleet, with the time of each stage."""

from contracts.lifecycle import Role
from scheduler.policy.blame import Stage
from scheduler.policy.fairness import Ticket
from scheduler.simulator.arrivals import Arrival

UNSET = -1.0


class Job:
    """One attempt of a request. Times are ms on the simulation's clock; UNSET until they happen."""

    __slots__ = (
        "alive", "arrival", "attempt", "batch", "blocked_ms", "cached_tokens", "context_at_join", "decode_id",
        "done_tokens", "end_ms", "expected_output", "feasible", "finish_step", "first_token_ms", "generous_output",
        "joined_seq", "kv_arrived_ms", "mix_at_first", "mixed_share", "number", "output_left",
        "placed_ms", "prefill_end_ms", "prefill_id", "prefill_left", "prefill_start_ms", "pushed_ms", "refused",
        "room_granted_ms", "stage", "ticket", "tpot_ms", "work_ms",
    )  # fmt: skip

    def __init__(self, arrival: Arrival, number: int, *, attempt: int = 1) -> None:
        self.arrival = arrival
        self.number = number
        self.attempt = attempt
        self.batch = arrival.tier == "batch"
        self.alive = True
        # filled in when it enters the queue
        self.pushed_ms = UNSET
        self.expected_output = 0.0  # tokens
        self.generous_output = 0.0  # tokens that nine in ten do not exceed
        self.feasible = True
        self.work_ms = 0.0  # computing its uncached prompt, as estimated at arrival
        self.ticket: Ticket | None = None
        self.blocked_ms: dict[Role, float] = {}  # waiting in the scheduler, by the role that had no room
        # filled in when it is placed and runs
        self.prefill_id = self.decode_id = ""
        self.placed_ms = self.room_granted_ms = self.prefill_start_ms = self.prefill_end_ms = UNSET
        self.kv_arrived_ms = self.first_token_ms = self.end_ms = UNSET
        self.cached_tokens = self.done_tokens = self.prefill_left = 0
        self.output_left = arrival.output_tokens
        self.context_at_join = self.finish_step = self.joined_seq = 0
        self.mix_at_first = self.mixed_share = self.tpot_ms = 0.0
        # filled in at its end
        self.refused = ""
        self.stage = Stage.NONE

    @property
    def arrived_ms(self) -> float:
        """When the gateway got the request."""
        return self.arrival.at_s * 1000

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self.end_ms >= 0

    @property
    def ttft_ms(self) -> float:
        """Time to first token; infinite when there was none."""
        return self.first_token_ms - self.arrived_ms if self.first_token_ms >= 0 else float("inf")
