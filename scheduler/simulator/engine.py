"""One simulated engine: prompts in chunks, decode in steps, a KV memory that fills up.

A stage is either one step that computes a chunk of prompts (beside one decode step, when requests
are decoding), or a run of decode steps during which nothing joins or leaves. Such a run is one
event, whatever its length: with B requests and K tokens its m steps take
`m*(d0 + d1*B + d2*K) + d2*B*m*(m-1)/2` ms. What arrives meanwhile joins at the next step's edge.
"""

import heapq
import math
from collections import deque
from typing import Protocol

import msgspec

from contracts.perf import LatencyModel
from scheduler.simulator.clock import Clock
from scheduler.simulator.job import Job


class EngineTraits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How engines are set up."""

    chunk_tokens: int = 8192
    """Prompt tokens per step when nothing decodes."""
    mixed_chunk_tokens: int = 2048
    """The same beside decodes, at most; the step's time limits it further."""
    mixed_chunk_floor: int = 64
    mixed_step_ms: float = 18.0
    """Time a mixed step aims at: a little below the TPOT target, as chunked prefill is tuned in practice."""
    mixing_cost: float = 1.1
    """Cost of prompt tokens in a mixed step over their cost alone; 1.0 and above."""
    join_margin_tokens: int = 64
    """KV tokens per decoding request kept free when another one joins."""


class EngineEvents(Protocol):
    """Who is told what an engine did."""

    def room_granted(self, engine: "Engine", job: Job) -> None:
        """KV memory for the prompt is reserved."""

    def prefill_done(self, engine: "Engine", job: Job) -> None:
        """The prompt is computed; its KV memory stays held."""

    def finished(self, engine: "Engine", job: Job) -> None:
        """The last token is out."""


class Engine:
    """State of one engine. `owner` is the worker's id."""

    def __init__(
        self, owner: str, *, latency: LatencyModel, traits: EngineTraits, clock: Clock, events: EngineEvents
    ) -> None:
        self.owner = owner
        self.latency = latency
        self.num_retracted = 0
        self.mix_ms = 0.0  # time decodes lost to prompts in the same step, since the start
        self._traits = traits
        self._clock = clock
        self._events = events
        self._prefills: deque[Job] = deque()
        self._batch_prefills: deque[Job] = deque()
        self._joining: deque[Job] = deque()
        self._retracted: deque[tuple[Job, int]] = deque()
        self._waiting_room: deque[Job] = deque()
        self._batch: dict[int, Job] = {}  # by order of joining
        self._ends: list[tuple[int, int]] = []  # (step at which it ends, order of joining)
        self._steps = 0
        self._batch_kv = 0
        self._held_kv = 0
        self._holding: set[Job] = set()  # whose prompts' memory is held: reserved, being computed, or computed
        self._join_seq = 0
        self._plan = 0  # number of the current stage; an event of another one is stale
        self._busy = False
        self._chunk: list[tuple[Job, int]] = []
        self._jump_from_ms = 0.0
        self._jump_steps = 0
        self._jump_first_ms = 0.0  # its first step
        self._jump_growth_ms = 0.0  # each step is this much longer than the one before

    # -- what policy may see ---------------------------------------------------------------------------

    @property
    def kv_used_tokens(self) -> int:
        """KV tokens held, as of the last edge of a step."""
        return self._batch_kv + self._held_kv

    @property
    def batch_kv_tokens(self) -> int:
        """The part of them that decodes."""
        return self._batch_kv

    def step_ms(self) -> float:
        """Return the time of a pure decode step now."""
        return self.latency.decode.step_ms(len(self._batch), self._batch_kv) if self._batch else 0.0

    # -- work in -----------------------------------------------------------------------------------------

    def reserve(self, job: Job) -> None:
        """Ask for KV memory for a prompt that is computed elsewhere; `room_granted` follows."""
        self._waiting_room.append(job)
        self._grant()

    def prefill(self, job: Job) -> None:
        """Compute the rest of a prompt: `job.prefill_left` after `job.done_tokens`."""
        (self._batch_prefills if job.batch else self._prefills).append(job)
        self._kick()

    def join(self, job: Job) -> None:
        """Decode a request whose prompt's KV is here (reserved or computed)."""
        self._joining.append(job)
        self._kick()

    def release(self, job: Job) -> None:
        """Free the KV memory of a prompt that has left for a decode engine."""
        self._drop(job)
        self._grant()
        if not self._busy:
            self._kick()

    def abort(self, job: Job) -> None:
        """Stop a request wherever it is; one whose prompt is in the current step ends with that step."""
        if any(job is chosen for chosen, _ in self._chunk):
            return
        for queue in (self._waiting_room, self._joining, self._prefills, self._batch_prefills):
            if job in queue:
                queue.remove(job)
        self._retracted = deque(entry for entry in self._retracted if entry[0] is not job)
        if self._batch.get(job.joined_seq) is job:
            del self._batch[job.joined_seq]
            self._batch_kv -= job.context_at_join + self._steps - (job.finish_step - job.output_left)
        self._drop(job)
        self._grant()

    def kill(self) -> None:
        """Lose everything."""
        for queue in (self._prefills, self._batch_prefills, self._joining, self._waiting_room):
            queue.clear()
        self._retracted.clear()
        self._batch.clear()
        self._ends.clear()
        self._chunk = []
        self._batch_kv = self._held_kv = 0
        self._holding.clear()
        self._busy = False
        self._plan += 1

    # -- memory --------------------------------------------------------------------------------------------

    def _fits(self, tokens: int) -> bool:
        margin = len(self._batch) * self._traits.join_margin_tokens
        used = self._batch_kv + self._held_kv
        return used == 0 or used + tokens + margin <= self.latency.kv_capacity_tokens

    def _hold(self, job: Job) -> None:
        self._holding.add(job)
        self._held_kv += job.arrival.prompt_tokens

    def _drop(self, job: Job) -> None:
        if job in self._holding:
            self._holding.remove(job)
            self._held_kv -= job.arrival.prompt_tokens

    def _grant(self) -> None:
        while self._waiting_room and self._fits(self._waiting_room[0].arrival.prompt_tokens):
            job = self._waiting_room.popleft()
            self._hold(job)
            self._events.room_granted(self, job)

    def _retract_for_one_step(self) -> None:
        """Put back the youngest until every other request has room for one more token."""
        while len(self._batch) > 1 and self._free < len(self._batch):
            seq, job = self._batch.popitem()
            context = job.context_at_join + self._steps - (job.finish_step - job.output_left)
            job.output_left = job.finish_step - self._steps
            job.joined_seq = -seq
            self._batch_kv -= context
            self._retracted.append((job, context))
            self.num_retracted += 1

    @property
    def _free(self) -> int:
        return self.latency.kv_capacity_tokens - self._batch_kv - self._held_kv

    # -- stages --------------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Let new work in: at once when idle, at the next step's edge otherwise."""
        if not self._busy:
            self._next_stage()
        elif self._jump_steps > 1:
            done = self._steps_within(self._clock.now_ms - self._jump_from_ms)
            if done + 1 < self._jump_steps:
                self._set_jump(done + 1)

    def _next_stage(self) -> None:
        self._let_join()
        self._compose()
        self._plan += 1
        self._jump_steps = 0
        if self._chunk:
            self._busy = True
            self._clock.after(self._mixed_step(), self._end_mixed, self._plan)
        elif self._batch:
            self._busy = True
            if self._free < len(self._batch):
                self._retract_for_one_step()
            batch = len(self._batch)
            cost = self.latency.decode
            self._jump_from_ms = self._clock.now_ms
            self._jump_first_ms = cost.step_ms(batch, self._batch_kv)
            self._jump_growth_ms = cost.per_kv_token_ms * batch
            self._set_jump(max(1, min(self._next_end() - self._steps, self._free // batch)))
        else:
            self._busy = False

    def _let_join(self) -> None:
        while self._retracted and self._fits(self._retracted[0][1]):
            job, context = self._retracted.popleft()
            self._add(job, context)
        while self._joining and len(self._batch) < self.latency.max_running:
            job = self._joining.popleft()
            self._drop(job)
            if job.first_token_ms < 0:
                job.first_token_ms = self._clock.now_ms
                job.mix_at_first = self.mix_ms
                job.output_left -= 1
            if job.output_left <= 0:
                self._end(job)
            else:
                self._add(job, job.arrival.prompt_tokens + 1)

    def _add(self, job: Job, context: int) -> None:
        self._join_seq += 1
        job.joined_seq = self._join_seq
        job.context_at_join = context
        job.finish_step = self._steps + job.output_left
        self._batch[self._join_seq] = job
        self._batch_kv += context
        heapq.heappush(self._ends, (job.finish_step, self._join_seq))

    def _next_end(self) -> int:
        while self._ends[0][1] not in self._batch:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _compose(self) -> None:
        """Choose the prompt tokens of the next step: interactive first."""
        self._chunk = []
        queues = [q for q in (self._prefills, self._batch_prefills) if q]
        if not queues:
            return
        budget = self._budget(queues[0][0])
        for queue in queues:
            for job in queue:
                if budget <= 0:
                    return
                if job not in self._holding:
                    if not self._fits(job.arrival.prompt_tokens):
                        return
                    self._hold(job)
                if job.prefill_start_ms < 0:
                    job.prefill_start_ms = self._clock.now_ms
                tokens = min(job.prefill_left, budget)
                self._chunk.append((job, tokens))
                budget -= tokens

    def _budget(self, first: Job) -> int:
        traits, cost = self._traits, self.latency.prefill
        if not self._batch:
            return traits.chunk_tokens
        room_ms = traits.mixed_step_ms - self.step_ms()
        per_token_ms = traits.mixing_cost * (cost.per_token_ms + 2 * cost.per_token_pair_ms * first.done_tokens)
        tokens = int(room_ms / per_token_ms)
        return min(max(tokens, traits.mixed_chunk_floor), traits.mixed_chunk_tokens)

    def _mixed_step(self) -> float:
        """Return the time of the step that computes the chosen chunk."""
        cost = self.latency.prefill
        prompts_ms = sum(cost.ms(tokens, job.done_tokens) - cost.fixed_ms for job, tokens in self._chunk)
        if not self._batch:
            return cost.fixed_ms + prompts_ms
        prompts_ms *= self._traits.mixing_cost
        self.mix_ms += prompts_ms
        return self.step_ms() + prompts_ms

    def _end_mixed(self, plan: int) -> None:
        if plan != self._plan:
            return
        if self._batch:
            if self._free < len(self._batch):
                self._retract_for_one_step()
            self._advance(1)
        for job, tokens in self._chunk:
            job.prefill_left -= tokens
            job.done_tokens += tokens
            if job.prefill_left <= 0:
                (self._batch_prefills if job.batch else self._prefills).popleft()
                job.prefill_end_ms = self._clock.now_ms
                self._events.prefill_done(self, job)
                if plan != self._plan:
                    return  # the fleet stopped this engine meanwhile
        self._next_stage()

    def _set_jump(self, steps: int) -> None:
        self._plan += 1
        self._jump_steps = steps
        self._clock.at(self._jump_from_ms + self._jump_ms(steps), self._end_jump, self._plan)

    def _jump_ms(self, steps: int) -> float:
        return steps * self._jump_first_ms + self._jump_growth_ms * steps * (steps - 1) / 2

    def _steps_within(self, elapsed_ms: float) -> int:
        """Return how many whole steps of the jump fit in a time."""
        half = self._jump_growth_ms / 2
        if half <= 0:
            return int(elapsed_ms / self._jump_first_ms)
        b = self._jump_first_ms - half
        return int((math.sqrt(b * b + 4 * half * elapsed_ms) - b) / (2 * half))

    def _end_jump(self, plan: int) -> None:
        if plan == self._plan:
            self._advance(self._jump_steps)
            if plan == self._plan:
                self._next_stage()

    def _advance(self, steps: int) -> None:
        """Count decode steps and end what is complete."""
        self._steps += steps
        self._batch_kv += steps * len(self._batch)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            _, seq = heapq.heappop(self._ends)
            job = self._batch.pop(seq, None)
            if job is not None:
                self._batch_kv -= job.context_at_join + job.output_left
                job.output_left = 0
                ended.append(job)
        for job in ended:
            self._end(job)
        if ended:
            self._grant()

    def _end(self, job: Job) -> None:
        job.end_ms = self._clock.now_ms
        decode_ms = job.end_ms - job.first_token_ms
        job.tpot_ms = decode_ms / max(1, job.arrival.output_tokens - 1)
        job.mixed_share = (self.mix_ms - job.mix_at_first) / decode_ms if decode_ms > 0 else 0.0
        self._events.finished(self, job)
