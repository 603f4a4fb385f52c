"""One chat completion from the HTTP request to the entry in the pool's inbox.

Everything that can refuse the request comes before the reservation, and the reservation before the
inbox, so a refused request leaves nothing behind.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request
from redis.exceptions import RedisError

from contracts.catalog import Catalog
from contracts.errors import NoCapacity
from contracts.identity import new_rid
from contracts.rating import Tokens
from contracts.slo import SloTarget
from contracts.units import Nano
from contracts.usage import Outcome, UsageEvent
from contracts.wire import Owner, Sampling, Submit, pack_ids
from gateway.admission import Admission, Admitted, Asked, ReservationUnknown, most_tokens, redis_down
from gateway.auth import Authenticator
from gateway.bodies import read_body
from gateway.fleet import Fleet
from gateway.generation import Effects, Generation
from gateway.inbox import Inbox
from gateway.models import Models, Servable
from gateway.outputs import EventStream, WholeAnswer
from gateway.prices import Prices
from gateway.prompt import PromptWorkshop
from gateway.schemas.chat import ChatRequest, decode_chat
from gateway.settings import Settings
from gateway.sse import SIMULATED, ChunkTemplate
from gateway.table import LiveTable
from gateway.tenants import ApiKey
from gateway.terms import Closed, Terms

Http = Request[Any, Any, Any]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is in the inbox, and the headers its answer carries."""

    generation: Generation
    output: EventStream | WholeAnswer
    headers: dict[str, str]


class Chat:
    """Starts chat completions."""

    def __init__(
        self,
        settings: Settings,
        *,
        gateway_id: str,
        catalog: Catalog,
        auth: Authenticator,
        models: Models,
        prices: Prices,
        workshop: PromptWorkshop,
        admission: Admission,
        fleet: Fleet,
        inbox: Inbox,
        table: LiveTable,
        effects: Effects,
    ) -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._currency = catalog.currency
        self._auth = auth
        self._models = models
        self._prices = prices
        self._workshop = workshop
        self._admission = admission
        self._fleet = fleet
        self._inbox = inbox
        self._table = table
        self._effects = effects
        self.stopping = False

    async def start(self, request: Http) -> Started:
        """Admit a request and write it to the inbox. Raises one of contracts.errors."""
        loop = asyncio.get_running_loop()
        arrived_s, now_ms = time.monotonic(), self._prices.now_ms()
        rid = new_rid(now_ms)
        request.scope["state"]["rid"] = rid
        authorization = request.headers.get("authorization")
        key = await self._auth.authenticate(authorization)
        body = await read_body(request.receive, max_bytes=self._settings.max_body_bytes)
        chat = decode_chat(body)
        model = self._models.servable(chat.model)
        ids = await self._workshop.encode(
            model.prompt, chat.messages, body_bytes=len(body), context_tokens=model.model.context_tokens
        )
        self._check_room(model)
        price = await self._prices.of(model.name, key.organisation_id, now_ms)
        owner = self._owner(key, chat, model, price=price)
        timeout_s = self._settings.request_timeout_s
        asked = Asked(
            rid=rid,
            pool=model.pool,
            owner=owner,
            price=price,
            prompt_tokens=len(ids),
            asked_tokens=chat.asked_tokens,
            default_tokens=model.model.default_max_tokens,
            context_tokens=model.model.context_tokens,
            num_samples=chat.num_samples,
            now_ms=now_ms,
            deadline_ms=now_ms + int(timeout_s * 1000),
        )
        most_tokens(asked)  # a prompt over the context is refused whatever the workers do
        self._models.check_path(model)
        terms = Terms(
            rid=rid,
            owner=owner,
            pool=model.pool,
            num_samples=chat.num_samples,
            stream=bool(chat.stream),
            prompt_tokens=len(ids),
            deadline_unix_ms=asked.deadline_ms,
            arrived_unix_ms=now_ms,
            arrived_s=arrived_s,
        )
        admitted = await self._admit(asked, key, authorization, terms)
        output = self._output(chat, rid, model.name, created_s=now_ms // 1000, simulated=owner.simulated)
        generation = Generation(
            terms, output, self._effects, loop=loop, forget=self._table.remove, deadline_s=timeout_s
        )
        self._table.add(generation)
        sampling = chat.sampling(admitted.max_tokens, model.model)
        submit = self._submit(terms, chat, ids, sampling, traceparent=request.headers.get("traceparent", ""))
        try:
            generation.written(await self._inbox.submit(submit))
        except RedisError:
            error = redis_down()
            generation.not_written(error)
            raise error from None
        except asyncio.CancelledError:
            generation.client_left()
            raise
        headers = {"x-request-id": rid, **admitted.headers}
        return Started(generation=generation, output=output, headers=headers)

    def _check_room(self, model: Servable) -> None:
        """Raise NoCapacity when this process or the pool's inbox takes no more."""
        pool, settings = self._fleet.pool(model.pool), self._settings
        if self.stopping:
            raise NoCapacity("This gateway is shutting down.", retry_after_s=1)
        if len(self._table) >= settings.max_streams:
            raise NoCapacity("This gateway runs as many requests as it may.", retry_after_s=1)
        if pool.inbox_bytes > settings.inbox_max_bytes or pool.inbox_entries > settings.inbox_max_entries:
            raise NoCapacity(f"The queue of '{model.name}' is full.", retry_after_s=5)

    def _owner(self, key: ApiKey, chat: ChatRequest, model: Servable, *, price: Any) -> Owner:
        tiers = model.model.tiers
        tier = chat.service_tier if chat.service_tier and chat.service_tier in tiers else "default"
        return Owner(
            org=key.organisation_id,
            project=key.project_id,
            key_id=key.id,
            model=model.name,
            tier=tier,
            price=price,
            slo=tiers.get(tier, SloTarget()),
            simulated=self._models.simulated(model.name),
        )

    async def _admit(self, asked: Asked, key: ApiKey, authorization: str | None, terms: Terms) -> Admitted:
        try:
            return await self._admission.admit(asked, key, authorization)
        except (ReservationUnknown, asyncio.CancelledError):
            # The script may have run although its answer was lost: give back what it took, if it did.
            if self._fleet.redis_up:
                self._effects.settle(_never_ran(terms))
            raise

    def _output(
        self, chat: ChatRequest, rid: str, model: str, *, created_s: int, simulated: bool
    ) -> EventStream | WholeAnswer:
        loop = asyncio.get_running_loop()
        if not chat.stream:
            return WholeAnswer(
                chunk_id=f"chatcmpl-{rid}",
                created_s=created_s,
                model=model,
                num_samples=chat.num_samples,
                currency=self._currency,
                now_s=time.monotonic,
            )
        template = ChunkTemplate(
            chunk_id=f"chatcmpl-{rid}",
            created_s=created_s,
            model=model,
            num_samples=chat.num_samples,
            with_usage=chat.wants_usage,
            fingerprint=SIMULATED if simulated else "",
        )
        return EventStream(
            template,
            num_samples=chat.num_samples,
            with_usage=chat.wants_usage,
            currency=self._currency,
            loop=loop,
        )

    def _submit(
        self, terms: Terms, chat: ChatRequest, ids: Sequence[int], sampling: Sampling, *, traceparent: str
    ) -> Submit:
        return Submit(
            rid=terms.rid,
            pool=terms.pool,
            gateway_id=self._gateway_id,
            owner=terms.owner,
            prompt=pack_ids(ids),
            sampling=sampling,
            deadline_unix_ms=terms.deadline_unix_ms,
            num_samples=terms.num_samples,
            stream=terms.stream,
            cache_salt=cache_salt(self._settings.cache_salt_key, terms.owner.org),
            session=chat.prompt_cache_key or chat.user or "",
            traceparent=traceparent,
        )


def cache_salt(key: str, org: str) -> str:
    """Return what keeps an organisation's prefixes apart from all others' in the engines' caches."""
    return hmac.new(key.encode(), org.encode(), hashlib.sha256).hexdigest()[:32]


def _never_ran(terms: Terms) -> Closed:
    owner = terms.owner
    event = UsageEvent(
        rid=terms.rid,
        org=owner.org,
        project=owner.project,
        key_id=owner.key_id,
        model=owner.model,
        pool=terms.pool,
        tier=owner.tier,
        outcome=Outcome.REFUSED,
        cause="not_admitted",
        tokens=Tokens(),
        price=owner.price,
        cost=Nano(0),
        stream=terms.stream,
        simulated=owner.simulated,
    )
    return Closed(event=event, entry_id="", ended_unix_ms=terms.arrived_unix_ms)
