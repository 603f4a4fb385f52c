"""Prompts that are computed again: how many the pool can afford, and continuations of answers that broke off.

A worker that dies takes the KV caches of its requests along, so all of them compute their prompts again, on
the workers that are left. Unbounded, that can bring these down as well. So tokens computed again are
budgeted: a tenth of all prompt tokens that the pool computes, and never less than one worker's KV cache per
minute, since the loss of one worker must be survivable in a pool that has only begun to work.
"""

import time
from collections.abc import Callable, Sequence

import structlog

from contracts.continuation import forbidden_by
from contracts.errors import Interrupted
from contracts.lifecycle import Phase, RequestState
from contracts.wire import Continue, Counts, Refused
from observability.metrics import Instruments
from scheduler.book import Book, Request
from scheduler.outbox import Outbox
from scheduler.registry import WorkerRegistry
from scheduler.verdicts import Verdicts

log = structlog.get_logger()

SHARE = 0.1
LEAST_TOKENS = 32_768
CAP_TOKENS = 1_000_000.0
REFILL_S = 60.0
_UNKNOWN_KEPT = 10_000


class RetryBudget:
    """Prompt tokens that may be computed again at the moment."""

    def __init__(self, *, floor_tokens: Callable[[], int], now_s: Callable[[], float] = time.monotonic) -> None:
        """`floor_tokens`: to what the budget comes back within a minute, whatever is computed."""
        self._floor_tokens = floor_tokens
        self._now_s = now_s
        self._filled_s = now_s()
        self._left_tokens: float | None = None

    @property
    def left_tokens(self) -> float:
        """What is left of the budget."""
        floor = max(LEAST_TOKENS, self._floor_tokens())
        now_s = self._now_s()
        refill = floor * (now_s - self._filled_s) / REFILL_S
        self._filled_s = now_s
        left = self._left_tokens
        if left is None:
            left = floor
        elif left < floor:
            left = min(floor, left + refill)
        self._left_tokens = left
        return left

    def earn(self, prompt_tokens: int) -> None:
        """Count a computed prompt."""
        left = self.left_tokens
        self._left_tokens = max(left, min(CAP_TOKENS, left + SHARE * prompt_tokens))

    def take(self, prompt_tokens: int) -> bool:
        """Spend on one retry; return whether the budget had it."""
        if prompt_tokens > self.left_tokens:
            return False
        assert self._left_tokens is not None
        self._left_tokens -= prompt_tokens
        return True


def largest_kv_tokens(registry: WorkerRegistry) -> int:
    """Return the KV capacity of the pool's largest worker."""
    return max((worker.kv_capacity_tokens for worker in registry.workers()), default=0)


class Retries:
    """Decides whether a prompt may be computed again, and takes the gateways' `Continue`."""

    def __init__(
        self,
        pool: str,
        *,
        book: Book,
        verdicts: Verdicts,
        budget: RetryBudget,
        instruments: Instruments,
        outbox: Outbox,
    ) -> None:
        self._outbox = outbox
        self._unknown: dict[str, None] = {}  # request ids, the oldest first
        self._pool = pool
        self._book = book
        self._verdicts = verdicts
        self._budget = budget
        self._instruments = instruments

    def affordable(self, request: Request, cause: str) -> bool:
        """Spend the prompt of another attempt; False = the budget does not have it."""
        tokens = request.input_tokens
        if not self._budget.take(tokens):
            log.warning("retry_budget_spent", pool=self._pool, rid=request.rid, tokens=tokens, cause=cause)
            return False
        self._instruments.retry_prefill_tokens.add(tokens, {"pool": self._pool, "cause": cause})
        return True

    def computed(self, request: Request, counts: Counts) -> None:
        """Count a computed prompt: it earns budget, and of a continuation, what it found in the cache."""
        self._budget.earn(counts.prompt_tokens - counts.cached_tokens)
        if request.first_prompt is None:
            request.first_prompt = counts
        if request.delivered and counts.cached_tokens:
            hand_off = request.hand_off.value if request.prefill_ref is not None else "none"
            self._instruments.saved_prefill_tokens.add(counts.cached_tokens, {"pool": self._pool, "hand_off": hand_off})

    def take(self, message: Continue) -> None:
        """Take the gateway's answer to AttemptLost: run the request from what the client has.

        The same message may come twice, and may come late: what it is answered with decides.
        """
        request = self._book.get(message.rid)
        if request is None:
            self._forgotten(message)
            return
        if request.stop_requested or message.lost_attempt > request.attempt:
            return
        unread = request.state is RequestState.FINISHED  # whole in a worker that the gateway cannot reach
        has_tokens = any(message.delivered)
        goes_on = request.delivered is None or bool(request.delivered)
        answered = message.lost_attempt < request.attempt and (goes_on or not has_tokens)  # the attempt after it runs
        if answered or (request.terminal and not unread) or (request.state is RequestState.QUEUED and not has_tokens):
            return
        if has_tokens:
            num_delivered = min(
                len(ids) // 4 for sample, ids in enumerate(message.delivered) if sample not in message.done
            )
            feature = forbidden_by(
                request.submit.sampling,
                request.submit.parsing,
                num_samples=request.submit.num_samples,
                num_delivered=num_delivered,
            )
            if feature is not None:
                text = f"The answer broke off, and with '{feature}' it cannot be continued."
                self._refuse(request, text, "not_continuable")
                return
        request.delivered = message.delivered
        request.delivered_chars = message.delivered_chars
        request.done = frozenset(message.done)
        request.excluded.update(message.unreachable)
        if request.state is RequestState.QUEUED:
            return  # it waits for workers, or for a take-over's decision, and goes on from there
        cause = "unreachable" if message.unreachable else "restarted_by_gateway"
        self._run_again(request, "continued" if has_tokens else cause, out_of_reach=message.unreachable)

    def _forgotten(self, message: Continue) -> None:
        """Refuse a request that nobody knows when its gateway asks once more, a patience later.

        A replica of Redis that lagged and was promoted has neither its entry nor its record. The first time it may
        still be on its way to us: what a former leader read is claimed bit by bit.
        """
        if message.rid not in self._unknown:
            self._unknown[message.rid] = None
            while len(self._unknown) > _UNKNOWN_KEPT:
                self._unknown.pop(next(iter(self._unknown)))
            return
        if message.gateway_id:
            text = "The answer broke off: what is known of the request was lost."
            log.warning("request_forgotten", pool=self._pool, rid=message.rid, gateway_id=message.gateway_id)
            notice = Refused(rid=message.rid, code=Interrupted.code, message=text)
            self._outbox.notify(message.gateway_id, notice)

    def _run_again(self, request: Request, cause: str, *, out_of_reach: Sequence[str]) -> None:
        if request.yielding:  # it was in the way of others: no fault, and no worker's
            self._verdicts.retry(request, "yielded", announce=False)
            return
        if not self.affordable(request, cause):
            text = "The answer broke off, and too many others have to be computed again."
            self._refuse(request, text, "retry_budget")
            return
        silent = Phase.PREFILL if request.state is RequestState.PREFILLING else Phase.DECODE
        lost = out_of_reach or [part.worker.worker_id for part in request.side(silent, Phase.UNIFIED)]
        if request.state is RequestState.FINISHED:
            request.reopen()
        self._verdicts.retry(request, cause, exclude=lost, announce=False)

    def _refuse(self, request: Request, text: str, reason: str) -> None:
        if request.state is RequestState.FINISHED:
            request.reopen()
        self._verdicts.refuse(request, Interrupted.code, text, reason)
