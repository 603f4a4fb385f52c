"""Settlement for gateways that died: the same script as theirs, so whoever comes first settles.

A gateway is dead when its lease has been gone for `dead_after_s`. Its waiting requests end at once. Those on
workers end by themselves: the workers see that nobody reads (READER_LOST), or, if the gateway only lost
Redis, they finish and say that the last batch was delivered. Then the request is settled here.

What comes back with old data of Redis may have been settled in what it lost, and its workers told to forget it. Billing
knows from their journals whether it finished, so it has `RESTORED_WITHIN_S` before it is settled here at no cost.
"""

import time
from collections.abc import Callable

import structlog
from redis.asyncio import Redis

from contracts import keys
from contracts.lifecycle import Phase, RequestState
from contracts.rating import Tokens
from contracts.settlement import SettlementScripts, actual_usage, outcome_of, usage_event_of
from contracts.usage import Outcome, UsageEvent
from contracts.wire import Counts
from scheduler.book import Book, Request
from scheduler.outbox import Outbox
from scheduler.verdicts import Verdicts
from scheduler.waiting import WaitingQueue

log = structlog.get_logger()

_GRACE_AFTER_DEADLINE_MS = 30_000
RESTORED_WITHIN_S = 45.0  # workers say theirs within 2 s, and billing reads it when 10 s were quiet, or after 20


class DeadGateways:
    """Watches the gateways whose requests one pool has, and settles for the dead."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        book: Book,
        waiting: WaitingQueue,
        verdicts: Verdicts,
        outbox: Outbox,
        scripts: SettlementScripts,
        dead_after_s: float,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._redis = redis
        self._pool = pool
        self._book = book
        self._waiting = waiting
        self._verdicts = verdicts
        self._outbox = outbox
        self._scripts = scripts
        self._dead_after_s = dead_after_s
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms
        self._missing_since_s: dict[str, float] = {}
        self._old_data_s = -RESTORED_WITHIN_S

    def redis_began_again(self, ago_s: float) -> None:
        """Take notice that what is claimed may come from old data of Redis."""
        self._old_data_s = self._now_s() - ago_s

    async def look(self) -> None:
        """Check every gateway once and settle what can be settled. Raises redis.exceptions.RedisError."""
        requests: dict[str, list[Request]] = {}
        for request in self._book:
            requests.setdefault(request.submit.gateway_id, []).append(request)
        for dead in await self._dead(list(requests)):
            for request in requests[dead]:
                self._wind_up(request)
                if request.terminal and request.ended and not self._may_be_restored(request):
                    await self._settle(request)

    async def _dead(self, gateway_ids: list[str]) -> list[str]:
        if not gateway_ids:
            self._missing_since_s.clear()
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for gateway_id in gateway_ids:
            pipeline.exists(keys.gateway_lease(gateway_id))
        now_s = self._now_s()
        missing: dict[str, float] = {}
        for gateway_id, alive in zip(gateway_ids, await pipeline.execute(), strict=True):
            if not alive:
                missing[gateway_id] = self._missing_since_s.get(gateway_id, now_s)
        for gateway_id in missing.keys() - self._missing_since_s.keys():
            log.warning("gateway_lease_gone", pool=self._pool, gateway_id=gateway_id)
        self._missing_since_s = missing
        return [gateway_id for gateway_id, since_s in missing.items() if now_s - since_s >= self._dead_after_s]

    def _may_be_restored(self, request: Request) -> bool:
        return request.claimed and self._now_s() < self._old_data_s + RESTORED_WITHIN_S

    def _wind_up(self, request: Request) -> None:
        """Bring an orphan to its end without starting anything for it."""
        overdue = self._now_unix_ms() > request.submit.deadline_unix_ms + _GRACE_AFTER_DEADLINE_MS
        if self._waiting.remove(request):
            request.move(RequestState.ABORTED)
        elif request.terminal:
            return
        else:
            request.stop_requested = True
            if overdue:
                self._verdicts.give_up(request, "gateway_dead")
            self._verdicts.end_if_stopped(request)

    async def _settle(self, request: Request) -> None:
        event = usage_event(request, self._pool)
        settled = await self._scripts.settle(event, actual_usage(event))
        log.info(
            "settled_for_dead_gateway",
            pool=self._pool,
            rid=request.rid,
            gateway_id=request.submit.gateway_id,
            outcome=event.outcome,
            already=not settled,
        )
        if settled:
            self._outbox.report_outcome(outcome_of(event))
        self._outbox.acknowledge(request.entry_id)
        self._outbox.delete_record(request.rid)
        self._verdicts.forget(request.rid, outcome_of(event))


def usage_event(request: Request, pool: str) -> UsageEvent:
    """Return what an ended request of a dead gateway costs: nothing, unless its last batch was acknowledged.

    The counts are the workers' own either way; what a lost worker took with it counts as zero, marked
    `estimated`. Prompt meters are those of sample 0.
    """
    streams = list(request.streaming_parts)
    finished = len(streams) == len(request.samples) and all(
        part.delivered and part.reason is not None and part.reason.complete for part in streams
    )
    prompt, confirmed = _prompt_counts(request)
    tokens = Tokens(
        prefill_computed=prompt.prompt_tokens - prompt.cached_tokens if prompt is not None else 0,
        prefill_cached=prompt.cached_tokens if prompt is not None else 0,
        decode=sum(part.counts.completion_tokens for part in streams if part.counts is not None)
        + sum(len(ids) // 4 for ids in request.delivered or ()),
    )
    ran = bool(request.parts)
    owner = request.submit.owner
    outcome = Outcome.FINISHED if finished else Outcome.INTERRUPTED
    return usage_event_of(
        owner,
        rid=request.rid,
        pool=pool,
        outcome=outcome,
        cause="" if finished else "gateway_dead",
        finish_reason=streams[0].reason.value if streams and streams[0].reason is not None else "",
        tokens=tokens,
        reasoning_tokens=sum(part.counts.reasoning_tokens for part in streams if part.counts is not None),
        path=request.path if ran else None,
        hand_off=request.hand_off_now if ran else None,
        attempts=max(1, request.attempt),
        batch=request.submit.batch,
        stream=request.submit.stream,
        prefill_worker=request.prefill_ref.worker_id if ran and request.prefill_ref is not None else "",
        decode_worker=request.decode_ref.worker_id if ran and request.decode_ref is not None else "",
        estimated=ran and not (confirmed and all(part.counts is not None for part in streams)),
        settled_by="scheduler",
    )


def _prompt_counts(request: Request) -> tuple[Counts | None, bool]:
    """Return the counts that hold the prompt's meters, and whether they are from the side that computed it."""
    if request.first_prompt is not None:
        return request.first_prompt, True
    for phase in (Phase.PREFILL, Phase.UNIFIED, Phase.DECODE):
        part = request.parts.get((phase, 0))
        if part is not None and part.counts is not None and part.counts.prompt_tokens:
            return part.counts, phase is not Phase.DECODE
    return None, False
