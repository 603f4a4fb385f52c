"""What the scheduler does per request, on the virtual clock: size it up, order it, place it, learn from its end."""

import math
import random
from collections.abc import Hashable, Mapping

from contracts.lifecycle import HandOff, Role
from scheduler.policy.admission import WaitingView, order
from scheduler.policy.blame import Stage, Stamps, blame
from scheduler.policy.cluster import ClusterView, RequestView, WorkerView
from scheduler.policy.demand import DemandSample, OutputMoments
from scheduler.policy.fairness import Ticket
from scheduler.policy.growing import GrowingAnswers
from scheduler.policy.lengths import LengthKey, LengthModel
from scheduler.policy.outlook import NO_HITS, Outlook
from scheduler.policy.placement import NoPlacement, Placement, place
from scheduler.policy.prefix import PrefixIndex
from scheduler.policy.scoring import score
from scheduler.policy.sizing import Asked, moments, size_up
from scheduler.simulator.arrivals import BLOCK_TOKENS
from scheduler.simulator.job import Job
from scheduler.simulator.setup import Placer, Setup

_MODEL = "model"
_STORE = "store"


class Router:
    """The policy's memory of one pool: prefixes, lengths and the dice."""

    def __init__(self, setup: Setup) -> None:
        self.index = PrefixIndex()
        self.lengths = LengthModel()
        self.growing = GrowingAnswers()
        self._setup = setup
        self._latency = setup.policy_latency
        self._rng = random.Random(setup.seed)  # noqa: S311 (a simulation, not a secret)
        self._promised: dict[Job, int] = {}

    # -- arrival -----------------------------------------------------------------------------------------------

    def size_up(self, job: Job, now_ms: float) -> DemandSample:
        """Forecast a request as it arrives, and give it its place in the order."""
        arrival = job.arrival
        cached = self._best_hit(job)
        asked = Asked(
            model=_MODEL,
            tenant=arrival.tenant,
            tier=arrival.tier,
            target=self._setup.target_of(arrival.tier),
            arrived_ms=job.arrived_ms,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens,
            cached_tokens=cached,
            prefix=arrival.blocks[0] if arrival.blocks and self._setup.group_batches else None,
            batch=job.batch,
        )
        sized = size_up(asked, self.lengths, self._latency, self._setup.weights, self.growing)
        job.expected_output, job.generous_output = sized.expected_output, sized.generous_output
        self._promised[job] = sized.promised_output
        job.work_ms, job.feasible = sized.work_ms, sized.feasible
        job.pushed_ms = now_ms
        job.ticket = sized.ticket
        if self._setup.placer is Placer.LEAST_LOADED:
            # The order of policy.admission as a key: tier by the queue, then arrival.
            _, arrived = order(WaitingView(tier=arrival.tier, arrival_seq=job.number, deadline_unix_ms=0))
            job.ticket = Ticket(
                tier=arrival.tier, tenant="", deadline_ms=float(arrived), latest_start_ms=math.inf, cost=0.0
            )
        return sized.sample

    def moments(self, kind: Hashable) -> OutputMoments:
        """Return what a kind of request is expected to answer."""
        return self.growing.moments(kind, moments(self.lengths, kind))

    # -- placing -------------------------------------------------------------------------------------------------

    def place(self, job: Job, cluster: ClusterView, now_ms: float, *, gives_way: bool) -> Placement | NoPlacement:
        """Choose workers for a waiting request, or say why none can take it."""
        arrival, setup = job.arrival, self._setup
        request = RequestView(
            prompt_tokens=arrival.prompt_tokens, max_tokens=arrival.max_tokens, hand_off=setup.hand_off
        )
        if setup.placer is Placer.LEAST_LOADED:
            return place(request, cluster, setup.limits)
        outlook = Outlook(
            latency=self._latency,
            target=setup.target_of(arrival.tier),
            resident_tpot_ms=setup.target.tpot_ms,
            output_tokens=job.expected_output,
            promised_output_tokens=self._promised[job],
            cached_tokens=self._hits(job, cluster),
            waited_ms=now_ms - job.arrived_ms,
            gives_way=gives_way,
            affinity=arrival.session,
            draw=self._rng.random(),
            background=job.batch,
        )
        return score(request, cluster, setup.scoring, outlook)

    def _hits(self, job: Job, cluster: ClusterView) -> Mapping[str, int]:
        blocks = job.arrival.blocks
        if not blocks:
            return NO_HITS
        held = self.index.match(blocks)
        if self._setup.hand_off is HandOff.STORE:
            tokens = held.get(_STORE, 0) * BLOCK_TOKENS
            return {worker.worker_id: tokens for worker in cluster.workers}
        return {worker_id: count * BLOCK_TOKENS for worker_id, count in held.items()}

    def _best_hit(self, job: Job) -> int:
        blocks = job.arrival.blocks
        if not blocks:
            return 0
        held = max(self.index.match(blocks).values(), default=0)
        return min(held * BLOCK_TOKENS, job.arrival.prompt_tokens - 1)

    def placed(self, job: Job, decode: WorkerView, now_ms: float) -> None:
        """Watch an answer grow from its first token on."""
        requests, held = decode.batch
        step_ms = self._latency.decode.step_ms(requests + 1, held)
        self.growing.started(
            (now_ms + job.work_ms) / 1000, job, _key(job), forecast_tokens=job.expected_output, step_ms=step_ms
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def learn(self, job: Job) -> None:
        """Take a finished answer's length."""
        self._promised.pop(job, None)
        self.growing.ended(job, job.arrival.output_tokens)
        self.lengths.learn(_key(job), job.arrival.output_tokens)

    def actual_cost(self, job: Job) -> float:
        """Return the virtual tokens that a finished request really was."""
        if self._setup.placer is Placer.LEAST_LOADED:
            return 0.0
        return self._setup.weights.cost(
            uncached_tokens=job.arrival.prompt_tokens - job.cached_tokens,
            cached_tokens=job.cached_tokens,
            output_tokens=job.arrival.output_tokens,
        )

    def stage_to_blame(self, job: Job) -> Stage:
        """Return where a finished request missed its targets."""
        latency, prompt = self._latency, job.arrival.prompt_tokens
        target = self._setup.target_of(job.arrival.tier)
        direct = job.prefill_id != "" and self._setup.hand_off is HandOff.DIRECT
        blocked_prefill = sum(ms for role, ms in job.blocked_ms.items() if role is not Role.DECODE)
        room_wait = job.room_granted_ms - job.placed_ms if direct else 0.0
        ready_ms = job.room_granted_ms if direct else job.placed_ms
        return blame(
            Stamps(
                target=target,
                ttft_ms=job.ttft_ms,
                tpot_ms=job.tpot_ms,
                prefill_wait_ms=blocked_prefill + job.prefill_start_ms - ready_ms,
                decode_wait_ms=job.blocked_ms.get(Role.DECODE, 0.0) + room_wait,
                prefill_ms=job.prefill_end_ms - job.prefill_start_ms,
                transfer_ms=job.first_token_ms - job.prefill_end_ms,
                expected_prefill_ms=latency.prefill.ms(prompt - job.cached_tokens, job.cached_tokens),
                expected_transfer_ms=latency.transfer.ms(prompt) if job.prefill_id else 0.0,
                idle_step_ms=latency.decode.step_ms(1, prompt),
                mixed_share=job.mixed_share,
            )
        )


def _key(job: Job) -> LengthKey:
    return LengthKey.of(model=_MODEL, tenant=job.arrival.tenant, prompt_tokens=job.arrival.prompt_tokens)
