"""Stored prompts and answers: whether an organisation has any, and those of one request.

The consent is the organisation's own: operators can neither give it nor read what was stored, unless they are members.
"""

import datetime as dt
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import structlog
from litestar import delete, get, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts.errors import NotFound
from contracts.wire import Change
from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest, taken
from gateway.admin.organisations import ORG
from gateway.admin.shapes import Done, Strict
from gateway.changes import announce
from gateway.lookup import rid_of
from gateway.openapi import json_operation
from gateway.portal.roles import Right
from gateway.schemas.choices import Choice
from gateway.text_book import DEFAULT_DAYS, MOST_DAYS, Consent, Talk, TextBook

log = structlog.get_logger()

TAGS = ["admin: stored texts"]
CONSENT = f"{ORG}/stored_texts"
TEXTS = f"{ORG}/requests/{{request_id:str}}/texts"


class NewConsent(Strict, frozen=True, kw_only=True):
    """Have prompts and answers stored from now on, for so many days."""

    days: Annotated[int, msgspec.Meta(ge=1, le=MOST_DAYS)] = DEFAULT_DAYS


class ConsentView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether prompts and answers are stored. `requests` and `bytes`: of what can be read now."""

    stored: bool
    since: dt.datetime | None
    days: int
    requests: int
    bytes: int
    object: Literal["stored_texts"] = "stored_texts"


class TalkView(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked and answered. `prompt`: the body as the client sent it; `broken`: why the answer is not whole."""

    request_id: str
    prompt: str
    prompt_cut: bool
    answers: Sequence[Choice]
    answer_cut: bool
    broken: str
    expires_at: dt.datetime
    object: Literal["request_texts"] = "request_texts"


class TextDesk:
    """What the handlers, and the portal's pages, do beside reading and answering."""

    def __init__(self, book: TextBook, redis: Redis) -> None:
        self.book = book
        self._redis = redis

    async def give(self, tenant: str, *, days: int, actor: str) -> None:
        """Have texts stored, on every gateway within the second."""
        await self.book.give(tenant, days=days, actor=actor)
        await self._tell(tenant)

    async def withdraw(self, tenant: str, *, actor: str) -> None:
        """Have no texts stored any more; what is stored cannot be read from now on, and is deleted."""
        await self.book.withdraw(tenant, actor=actor)
        await self._tell(tenant)

    async def find(self, tenant: str, name: str) -> Talk:
        """Return what is stored of a request, by its id or its answer's. Raises NotFound."""
        rid = rid_of(name)
        found = await self.book.find(tenant, rid) if rid is not None else None
        if found is None:
            raise NotFound(f"Nothing is stored of the request '{name}'.", param="request_id")
        return found

    async def delete(self, tenant: str, name: str, *, actor: str) -> None:
        """Delete what is stored of a request. Raises NotFound."""
        rid = rid_of(name)
        if rid is None:
            raise NotFound(f"Nothing is stored of the request '{name}'.", param="request_id")
        await self.book.delete(tenant, rid, actor=actor)

    async def _tell(self, tenant: str) -> None:
        try:
            await announce(self._redis, Change(kind="texts", id=tenant, state=""))
        except RedisError:  # gateways read keys anew in half a minute; a withdrawal is in force already
            log.warning("consent_not_announced", org=tenant)


def text_routes(callers: Callers, desk: TextDesk) -> list[HTTPRouteHandler]:
    """Return the handlers of stored prompts and answers."""

    @get(CONSENT, summary="Get whether texts are stored", operation_id="getStoredTexts", tags=TAGS)
    async def get_consent(request: AnyRequest, organisation: FromPath[str]) -> ConsentView:
        """Return whether prompts and answers are stored, since when, for how long, and how much there is."""
        caller = await callers.about(request, organisation, Right.READ)
        return consent_view(await desk.book.consent(caller.tenant))

    @put(
        CONSENT,
        summary="Have texts stored",
        operation_id="putStoredTexts",
        tags=TAGS,
        operation_class=json_operation(NewConsent, ConsentView),
    )
    async def put_consent(request: AnyRequest, organisation: FromPath[str]) -> ConsentView:
        """Have prompts and answers of requests that arrive from now on stored. Owners and admins only."""
        caller = await callers.about(request, organisation, Right.STORAGE)
        wanted = await taken(request, NewConsent)
        await desk.give(caller.tenant, days=wanted.days, actor=caller.actor)
        return consent_view(await desk.book.consent(caller.tenant))

    @delete(CONSENT, summary="Store texts no more", operation_id="deleteStoredTexts", tags=TAGS, status_code=200)
    async def delete_consent(request: AnyRequest, organisation: FromPath[str]) -> Done:
        """Store nothing from now on. What is stored cannot be read any more and is deleted within the hour."""
        caller = await callers.about(request, organisation, Right.STORAGE)
        await desk.withdraw(caller.tenant, actor=caller.actor)
        return Done(id=caller.tenant, object="stored_texts", deleted=True)

    @get(TEXTS, summary="Get prompt and answer of a request", operation_id="getRequestTexts", tags=TAGS)
    async def get_texts(request: AnyRequest, organisation: FromPath[str], request_id: FromPath[str]) -> TalkView:
        """Return what one request asked and was answered, where the organisation has that stored."""
        caller = await callers.about(request, organisation, Right.TEXTS)
        talk = await desk.find(caller.tenant, request_id)
        return TalkView(
            request_id=talk.rid,
            prompt=talk.prompt,
            prompt_cut=talk.prompt_cut,
            answers=talk.answers,
            answer_cut=talk.answer_cut,
            broken=talk.broken,
            expires_at=talk.expires_at,
        )

    @delete(
        TEXTS,
        summary="Delete prompt and answer of a request",
        operation_id="deleteRequestTexts",
        tags=TAGS,
        status_code=200,
    )
    async def delete_texts(request: AnyRequest, organisation: FromPath[str], request_id: FromPath[str]) -> Done:
        """Delete what is stored of one request. Owners and admins only."""
        caller = await callers.about(request, organisation, Right.STORAGE)
        await desk.delete(caller.tenant, request_id, actor=caller.actor)
        return Done(id=request_id, object="request_texts", deleted=True)

    return [get_consent, put_consent, delete_consent, get_texts, delete_texts]


def consent_view(found: Consent) -> ConsentView:
    """Return a consent as it is answered."""
    return ConsentView(
        stored=found.since is not None,
        since=found.since,
        days=found.days,
        requests=found.num_requests,
        bytes=found.num_bytes,
    )
