"""The policy's memory of one pool during one term: prefixes, answer lengths, costs, and the dice.

What `scheduler.simulator.router` is on the virtual clock, this is in production; both call the same policy.
"""

import random
import time
from collections.abc import Callable, Hashable, Mapping

from contracts.identity import at_ms
from contracts.perf import DEFAULT_LATENCY, LatencyModel
from contracts.prefix import BLOCK_TOKENS, prompt_blocks, scope
from scheduler.book import Request
from scheduler.policy.cluster import ClusterView
from scheduler.policy.demand import OutputMoments
from scheduler.policy.fairness import TokenWeights
from scheduler.policy.growing import GrowingAnswers
from scheduler.policy.lengths import LengthModel
from scheduler.policy.links import place_over_links
from scheduler.policy.outlook import NO_HITS, Outlook, ScoringLimits
from scheduler.policy.scoring import NotScored, Scored
from scheduler.policy.sizing import Asked, moments, size_up
from scheduler.policy.turns import BATCH_TIER
from scheduler.prefixes import Prefixes
from scheduler.profile import PoolProfile

_OLDEST_ARRIVAL_MS = 600_000.0


class Router:
    """Sizes requests up, places them, and learns from their end."""

    def __init__(
        self,
        profile: PoolProfile,
        *,
        prefixes: Prefixes | None = None,
        scoring: ScoringLimits | None = None,
        weights: TokenWeights | None = None,
        latency: Callable[[], LatencyModel] | None = None,
        costs_known: Callable[[], bool] = lambda: True,
        draw: Callable[[], float] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self.prefixes = prefixes or Prefixes()
        self.lengths = LengthModel()
        self.growing = GrowingAnswers()
        self.revision = ""
        """Of the pool's weights: part of every block's name. Empty until a worker is known."""
        self._profile = profile
        self._scoring = scoring or ScoringLimits()
        self._weights = weights or TokenWeights()
        self._latency = latency or (lambda: profile.latency or DEFAULT_LATENCY)
        self.costs_known = costs_known
        self._draw = draw or random.random
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms

    @property
    def latency(self) -> LatencyModel:
        """Costs of a worker of the pool, as believed at the moment."""
        return self._latency()

    @property
    def now_ms(self) -> float:
        """The clock of tickets and deadlines: monotonic, ms."""
        return self._now_s() * 1000

    # -- arrival -----------------------------------------------------------------------------------

    def size_up(self, request: Request) -> None:
        """Forecast a request as it arrives, and give it its place in the order."""
        submit = request.submit
        owner = submit.owner
        age_ms = min(max(0.0, self._now_unix_ms() - at_ms(submit.rid)), _OLDEST_ARRIVAL_MS)
        request.arrived_ms = self.now_ms - age_ms
        request.tier = BATCH_TIER if submit.batch else owner.tier
        request.hand_off = self._profile.hand_off
        if self.revision:
            start = scope(model_revision=self.revision, adapter=submit.adapter, salt=submit.cache_salt)
            request.blocks = tuple(prompt_blocks(submit.prompt, start))
        held = max(self.prefixes.index.match(request.blocks).values(), default=0) * BLOCK_TOKENS
        request.sized = size_up(
            Asked(
                model=owner.model,
                tenant=owner.org,
                tier=request.tier,
                target=owner.slo,
                arrived_ms=request.arrived_ms,
                prompt_tokens=request.prompt_tokens,
                max_tokens=submit.sampling.max_tokens,
                num_samples=submit.num_samples,
                cached_tokens=max(0, min(held, request.prompt_tokens - 1)),
                prefix=request.blocks[0] if request.blocks else None,
                batch=request.tier == BATCH_TIER,
            ),
            self.lengths,
            self.latency,
            self._weights,
            self.growing,
        )

    # -- placing -----------------------------------------------------------------------------------

    def place(self, request: Request, cluster: ClusterView, *, gives_way: bool) -> Scored | NotScored:
        """Choose workers for a waiting request, or say what it waits for."""
        sized = request.sized
        assert sized is not None
        outlook = Outlook(
            latency=self.latency,
            target=request.submit.owner.slo,
            resident_tpot_ms=self._profile.resident_tpot_ms,
            output_tokens=sized.expected_output,
            promised_output_tokens=sized.promised_output,
            cached_tokens=self._hits(request),
            waited_ms=self.now_ms - request.arrived_ms,
            gives_way=gives_way,
            affinity=request.submit.session,
            draw=self._draw(),
            background=request.tier == BATCH_TIER,
        )
        return place_over_links(request.view(), cluster, self._scoring, outlook)

    def _hits(self, request: Request) -> Mapping[str, int]:
        if not request.blocks:
            return NO_HITS
        return {worker_id: n * BLOCK_TOKENS for worker_id, n in self.prefixes.index.match(request.blocks).items()}

    def placed(self, request: Request, placement: Scored) -> None:
        """Expect a placed request's prompt in the cache of the worker that computes it.

        The worker's own events correct this; without them those that come next would go elsewhere.
        """
        computes = placement.prefill or placement.decode
        request.hoped_cached_tokens = placement.cached_tokens
        request.placed_ms = self.now_ms
        request.predicted_ttft_ms = placement.predicted_ttft_ms
        request.predicted_step_ms = placement.predicted_step_ms
        if request.blocks:
            self.prefixes.expected(computes.worker_id, computes.epoch, request.blocks)
        if request.sized is not None and request.attempt == 1 and request.tier != BATCH_TIER:
            requests, held = placement.decode.batch
            self.growing.started(
                (self.now_ms + request.work_ms) / 1000,
                request.rid,
                request.sized.key,
                forecast_tokens=request.sized.expected_output,
                step_ms=self.latency.decode.step_ms(requests + 1, held),
            )

    # -- the end -----------------------------------------------------------------------------------

    def generated(self, request: Request, output_tokens: int) -> None:
        """Take that an answer grows no more. What it teaches of lengths waits for its settlement: see `learn`."""
        self.growing.ended(request.rid, output_tokens)

    def learn(self, request: Request, output_tokens: int) -> None:
        """Take the length of a complete answer, per sample."""
        if request.sized is not None:
            self.lengths.learn(request.sized.key, output_tokens)
            self.growing.ended(request.rid, output_tokens)

    def broken_off(self, request: Request) -> None:
        """Take that a request ended without a complete answer."""
        self.growing.forget(request.rid)

    def moments(self, kind: Hashable) -> OutputMoments:
        """Return what a kind of request is expected to answer: by finished answers, and by those under way."""
        return self.growing.moments(kind, moments(self.lengths, kind))

    def actual_cost(self, request: Request, *, cached_tokens: int, output_tokens: int) -> float:
        """Return the virtual tokens that an ended request really was, over all samples."""
        computed = request.prompt_tokens * request.submit.num_samples - cached_tokens
        return self._weights.cost(
            uncached_tokens=max(0, computed), cached_tokens=cached_tokens, output_tokens=output_tokens
        )
