"""From an HTTP request, or a line of a batch, to entries in a pool's inbox. The same path for every endpoint.

1. `arrive`: the request id, the key, the body.
2. The endpoint checks the body and makes token ids: a `Work`.
3. `start`: everything that can refuse comes before the reservation, and the reservation before the inbox,
   so a refused request leaves nothing behind.

A work with several prompts becomes as many requests, each with its own id, meters and reservation; the
first one has the id of the arrival. They start together or not at all.
"""

import asyncio
import hashlib
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from litestar import Request
from redis.exceptions import RedisError

from contracts.dimensions import MAX_NAME, NO_DIMENSIONS, Dimensions
from contracts.errors import NoCapacity, ServingError
from contracts.identity import at_ms, new_rid
from contracts.parsing import Parsing
from contracts.slo import SloTarget
from contracts.usage import Outcome
from contracts.wire import Owner, Sampling, Submit, pack_ids
from gateway.accounting import never_ran
from gateway.admission import Admission, Asked, ReservationUnknown, most_tokens, redis_down
from gateway.auth import credential, headers_of
from gateway.bodies import check_encoding, read_body
from gateway.effects import Effects
from gateway.fleet import Fleet
from gateway.generation import Generation
from gateway.guard import Guard
from gateway.inbox import Inbox
from gateway.models import Models, Servable
from gateway.outputs import Output
from gateway.prices import Prices
from gateway.settings import Settings
from gateway.table import LiveTable
from gateway.targets import HEADER, MAX_WAIT, read_max_wait, read_targets, targets_of
from gateway.tenants import ApiKey
from gateway.terms import Admitted, Terms
from gateway.texts import Texts
from gateway.traces import Traces

Http = Request[Any, Any, Any]
COLD_START: Final = "x-pdgate-cold-start"  # seconds until the model is expected to serve; only when it slept
BATCH_TIER: Final = "batch"  # behind all others, without SLO targets of its own unless the catalogue gives some


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose sender is known and whose body is read."""

    rid: str
    key: ApiKey
    reload_key: Callable[[], Awaitable[ApiKey]]
    body: bytes
    arrived_unix_ms: int
    arrived_s: float  # monotonic
    route: str  # for metrics
    traceparent: str = ""
    reference: str = ""  # the client's own name of the request
    batch: bool = False
    repeated: bool = False  # a line whose answer was paid and then lost
    slo: SloTarget | None = None  # targets that the request names for itself
    max_wait_s: float = math.inf  # for a model that sleeps
    session: str = ""  # affinity key, from the headers

    @property
    def created_s(self) -> int:
        """Return the Unix time that answers carry."""
        return self.arrived_unix_ms // 1000

    @property
    def sees_workers(self) -> bool:
        """Return whether the key may know which workers serve it."""
        return any(scopes.sees_workers for scopes in self.key.bounds)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint wants generated. `sampling` gets the effective maximum of tokens."""

    model: Servable
    prompts: Sequence[Sequence[int]]  # token ids
    sampling: Callable[[int], Sampling]
    parsing: Parsing | None = None  # None: answers are plain text
    asked_tokens: int | None = None  # most tokens per sample; None: the client did not say
    num_samples: int = 1
    stream: bool = False
    tier: str | None = None
    session: str = ""  # affinity key
    dimensions: Dimensions = NO_DIMENSIONS
    prompt_field: str = "messages"  # what the prompt is called in the body
    prompt_only: bool = False  # the prompts are copies of one that is computed ahead; no answer is wanted


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are in the inbox, and the headers their answer carries."""

    generations: Sequence[Generation]
    headers: dict[str, str]
    route: str
    sees_workers: bool = False  # the key may know which workers served it

    @property
    def complete(self) -> bool:
        """Return whether every answer came to its own end."""
        return all(one.event is not None and one.event.outcome is Outcome.FINISHED for one in self.generations)

    def client_left(self) -> None:
        """Stop all work: nobody waits for the answer. Changes nothing after a proper end."""
        for generation in self.generations:
            generation.client_left()

    def break_off(self, cause: str) -> None:
        """Stop all work for a reason of ours: it costs nothing. Changes nothing after a proper end."""
        for generation in self.generations:
            generation.break_off(cause)


class Starter:
    """Starts what endpoints ask for."""

    def __init__(
        self,
        settings: Settings,
        *,
        gateway_id: str,
        guard: Guard,
        models: Models,
        prices: Prices,
        admission: Admission,
        fleet: Fleet,
        inbox: Inbox,
        table: LiveTable,
        effects: Effects,
        traces: Traces,
        texts: Texts,
    ) -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._guard = guard
        self._models = models
        self._prices = prices
        self._admission = admission
        self._fleet = fleet
        self._inbox = inbox
        self._table = table
        self._effects = effects
        self._traces = traces
        self._texts = texts
        self.stopping = False

    async def arrive(self, request: Http, *, confirm: bool = False, max_bytes: int | None = None) -> Arrival:
        """Authenticate a request and read its body. Raises one of contracts.errors.

        Args:
            request: whose key is in `Authorization` or `x-api-key`.
            confirm: compare the key with the shard now, because nothing will be reserved.
            max_bytes: of the body; default: the settings' limit.
        """
        arrived_s, now_ms = time.monotonic(), self._prices.now_ms()
        rid = new_rid(now_ms)
        request.scope["state"]["rid"] = rid
        headers = headers_of(request.scope)
        authorization = credential(headers)
        key = await self._guard.key_of(request, serving=not confirm, headers=headers)
        check_encoding(headers.get("content-encoding"))
        body = await read_body(
            request.receive,
            max_bytes=max_bytes or self._settings.max_body_bytes,
            timeout_s=self._settings.body_timeout_s,
        )
        return Arrival(
            rid=rid,
            key=key,
            reload_key=partial(self._guard.reload, authorization),
            body=body,
            arrived_unix_ms=now_ms,
            arrived_s=arrived_s,
            route=request.scope["path"],
            traceparent=headers.get("traceparent", ""),
            reference=reference_of(headers),
            slo=read_targets(headers.get(HEADER, "")),
            max_wait_s=read_max_wait(headers.get(MAX_WAIT, "")),
            session=headers.get("x-session-id", "")[:MAX_NAME],
        )

    def new_rid(self) -> str:
        """Return the id of a request that arrives now."""
        return new_rid(self._prices.now_ms())

    def arrive_later(
        self,
        key: ApiKey,
        body: bytes,
        endpoint: str,
        *,
        rid: str,
        repeated: bool,
        reload_key: Callable[[], Awaitable[ApiKey]],
    ) -> Arrival:
        """Return a line of a batch as a request that arrives when `rid` was made, in the name of `key`."""
        now_ms = at_ms(rid)
        return Arrival(
            rid=rid,
            repeated=repeated,
            key=key,
            reload_key=reload_key,
            body=body,
            arrived_unix_ms=now_ms,
            arrived_s=time.monotonic(),
            route=endpoint,
            batch=True,
        )

    def arrive_here(
        self, key: ApiKey, body: bytes, endpoint: str, *, reload_key: Callable[[], Awaitable[ApiKey]]
    ) -> Arrival:
        """Return what a page of ours asks in the name of `key` as a request that arrives now."""
        now_ms = self._prices.now_ms()
        return Arrival(
            rid=new_rid(now_ms),
            key=key,
            reload_key=reload_key,
            body=body,
            arrived_unix_ms=now_ms,
            arrived_s=time.monotonic(),
            route=endpoint,
        )

    async def start(self, arrival: Arrival, work: Work, outputs: Sequence[Output]) -> Started:
        """Admit a work and write it to the inbox; prompt i writes to output i. Raises one of contracts.errors."""
        model = work.model
        self._guard.check_work(arrival.key, model=model.name, tier="default" if arrival.batch else tier_of(work))
        self._check_room(model, len(work.prompts))
        owner = await self._owner(arrival, work)
        asked = [
            self._asked(
                arrival,
                work,
                self._traced(owner, arrival),
                rid=arrival.rid if i == 0 else None,
                prompt_tokens=len(ids),
            )
            for i, ids in enumerate(work.prompts)
        ]
        for one in asked:
            most_tokens(one)  # a prompt over the context is refused whatever the workers do
        may_wait_s = min(self._settings.request_timeout_s, arrival.max_wait_s)
        cold_s = self._models.check_path(model, may_wait_s=may_wait_s)
        terms = [self._terms(arrival, work, one) for one in asked]
        admitted = await self._admit_all(arrival, asked, terms)
        if arrival.key.keeps_texts:
            outputs = self._texts.recorded(arrival.body, terms, outputs)
        generations = [
            Generation(
                one,
                granted,
                output,
                self._effects,
                loop=asyncio.get_running_loop(),
                forget=self._table.remove,
                deadline_s=self._settings.request_timeout_s,
            )
            for one, granted, output in zip(terms, admitted, outputs, strict=True)
        ]
        for generation in generations:
            self._table.add(generation)
        self._check_still(arrival.key, generations)
        await self._submit_all(arrival, work, generations, admitted)
        headers = {"x-request-id": arrival.rid, **admitted[-1].headers, **model.headers}
        if cold_s is not None:
            headers[COLD_START] = f"{cold_s:.1f}"
        if arrival.key.imported:
            headers["x-pdgate-rotate-key"] = "imported"
        return Started(generations=generations, headers=headers, route=arrival.route, sees_workers=arrival.sees_workers)

    def _check_still(self, key: ApiKey, generations: Sequence[Generation]) -> None:
        """End at once what was admitted while its key was revoked or its tenant held."""
        try:
            self._guard.check_still(key, model=generations[0].terms.owner.model)
        except ServingError as error:
            for generation in generations:
                generation.not_written(error)
            raise

    def _check_room(self, model: Servable, num_prompts: int) -> None:
        """Raise NoCapacity when this process or the pool's inbox takes no more."""
        pool, settings = self._fleet.pool(model.pool), self._settings
        if self.stopping:
            raise NoCapacity("This gateway is shutting down.", retry_after_s=1)
        if len(self._table) + num_prompts > settings.max_streams:
            raise NoCapacity("This gateway runs as many requests as it may.", retry_after_s=1)
        if pool.inbox_bytes > settings.inbox_max_bytes or pool.inbox_entries > settings.inbox_max_entries:
            raise NoCapacity(f"The queue of '{model.name}' is full.", retry_after_s=5)

    async def _owner(self, arrival: Arrival, work: Work) -> Owner:
        model, key = work.model, arrival.key
        tiers = model.model.tiers
        tier = BATCH_TIER if arrival.batch else tier_of(work)
        price = await self._prices.of(model.name, key.organisation_id, arrival.arrived_unix_ms, tier)
        return Owner(
            org=key.organisation_id,
            project=key.project_id,
            key_id=key.id,
            model=model.name,
            tier=tier,
            price=price,
            slo=SloTarget()
            if work.prompt_only
            else targets_of(arrival.slo, tiers.get(tier, SloTarget()), () if tier == BATCH_TIER else key.bounds),
            simulated=self._models.simulated(model.name),
            dimensions=self._dimensions(key, work.dimensions),
            share_group=key.share_group,
            repeated=arrival.repeated,
            batch=arrival.batch,
        )

    def _traced(self, owner: Owner, arrival: Arrival) -> Owner:
        """Return the terms with a trace of their own: one for each prompt of a body."""
        traceparent, parent_id = self._traces.begin(arrival.traceparent, owner.tier)
        if not traceparent:
            return owner
        return msgspec.structs.replace(owner, traceparent=traceparent, trace_parent_id=parent_id)

    def _dimensions(self, key: ApiKey, said: Dimensions) -> Dimensions:
        if not said.safety_identifier or not any(scopes.hashes_identifiers for scopes in key.bounds):
            return said
        secret = f"{self._settings.cache_salt_key}/{key.organisation_id}".encode()
        hashed = hmac.new(secret, said.safety_identifier.encode(), hashlib.sha256).hexdigest()[:32]
        return msgspec.structs.replace(said, safety_identifier=hashed)

    def _asked(self, arrival: Arrival, work: Work, owner: Owner, *, rid: str | None, prompt_tokens: int) -> Asked:
        model = work.model.model
        return Asked(
            rid=rid or new_rid(arrival.arrived_unix_ms),
            pool=work.model.pool,
            owner=owner,
            price=owner.price,
            prompt_tokens=prompt_tokens,
            asked_tokens=work.asked_tokens,
            default_tokens=model.default_max_tokens,
            context_tokens=model.context_tokens,
            num_samples=work.num_samples,
            now_ms=arrival.arrived_unix_ms,
            prompt_field=work.prompt_field,
            deadline_ms=arrival.arrived_unix_ms + int(self._settings.request_timeout_s * 1000),
        )

    def _terms(self, arrival: Arrival, work: Work, asked: Asked) -> Terms:
        return Terms(
            rid=asked.rid,
            owner=asked.owner,
            pool=asked.pool,
            num_samples=work.num_samples,
            stream=work.stream,
            batch=arrival.batch,
            prompt_tokens=asked.prompt_tokens,
            deadline_unix_ms=asked.deadline_ms,
            arrived_unix_ms=arrival.arrived_unix_ms,
            arrived_s=arrival.arrived_s,
            prompt_only=work.prompt_only,
            gateway_id=self._gateway_id,
        )

    async def _admit_all(self, arrival: Arrival, asked: Sequence[Asked], terms: Sequence[Terms]) -> list[Admitted]:
        admitted: list[Admitted] = []
        try:
            for one in asked:
                admitted.append(await self._admission.admit(one, arrival.key, arrival.reload_key))  # noqa: PERF401 - what stands is given back
        except BaseException as error:
            stands = len(admitted)
            if isinstance(error, ReservationUnknown | asyncio.CancelledError):
                stands += 1  # the script may have run although its answer was lost
            if self._fleet.redis_up or stands > 1:
                for one_terms in terms[:stands]:
                    self._effects.settle(never_ran(one_terms))
            raise
        return admitted

    async def _submit_all(
        self, arrival: Arrival, work: Work, generations: Sequence[Generation], admitted: Sequence[Admitted]
    ) -> None:
        for i, generation in enumerate(generations):
            sampling = work.sampling(admitted[i].max_tokens)
            submit = self._submit(arrival, work, generation.terms, i, sampling)
            try:
                generation.written(await self._inbox.submit(submit))
            except RedisError:
                error = redis_down()
                for unwritten in generations[i:]:
                    unwritten.not_written(error)
                for written in generations[:i]:
                    written.client_left()
                raise error from None
            except asyncio.CancelledError:
                for any_of_them in generations:
                    any_of_them.client_left()
                raise

    def _submit(self, arrival: Arrival, work: Work, terms: Terms, number: int, sampling: Sampling) -> Submit:
        return Submit(
            rid=terms.rid,
            pool=terms.pool,
            gateway_id=self._gateway_id,
            owner=terms.owner,
            prompt=pack_ids(work.prompts[number]),
            sampling=sampling,
            deadline_unix_ms=terms.deadline_unix_ms,
            num_samples=terms.num_samples,
            stream=terms.stream,
            batch=arrival.batch,
            cache_salt=cache_salt(self._settings.cache_salt_key, terms.owner.share_group or terms.owner.org),
            session=arrival.session or work.session,
            adapter=work.model.name if work.model.model.adapter else "",
            parsing=work.parsing,
            local=work.model.local,
            warm_replica=number + 1 if work.prompt_only else 0,
            unreachable=self._fleet.unreachable(terms.pool),
        )


def tier_of(work: Work) -> str:
    """Return the tier that a work gets: the one it asks for, if its model has it."""
    return work.tier if work.tier and work.tier in work.model.model.tiers else "default"


def reference_of(headers: Mapping[str, str]) -> str:
    """Return the client's own name of a request, which is kept beside ours."""
    return headers.get("x-client-request-id") or headers.get("x-request-id") or ""


def cache_salt(key: str, org: str) -> str:
    """Return what keeps an organisation's prefixes apart from all others' in the engines' caches."""
    return hmac.digest(key.encode(), org.encode(), hashlib.sha256).hex()[:32]
