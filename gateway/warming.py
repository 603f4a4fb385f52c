"""Prompts computed ahead of the requests that begin with them: `POST /v1/prefixes/warm`.

A copy is an ordinary request for one token that nobody sees: the same limits, placement and settlement, with the
prompt's meters and no decode. Copy k runs on the k-th of the workers that hold most of the prompt already, so asking
again after a role change or an eviction makes what is missing and finds the rest.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from contracts.catalog import Catalog
from contracts.errors import BadRequest
from contracts.lifecycle import Role, WorkerState
from contracts.usage import UsageEvent
from contracts.wire import Sampling
from gateway.chat import Chat
from gateway.fleet import Fleet
from gateway.joint import Joint
from gateway.models import Models, Servable
from gateway.outputs import WholeAnswer
from gateway.prompt import PromptWorkshop
from gateway.schemas.answers import Served, Telling, Usage, served_of, usage_of
from gateway.schemas.chat import ChatRequest
from gateway.schemas.conversation import Message, check_messages
from gateway.schemas.decoding import decode_body
from gateway.schemas.tools import Tool, check_tools
from gateway.starter import Arrival, Started, Starter, Work

MAX_COPIES = 64


class WarmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute: a conversation with its tools, or plain text."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_COPIES)] | None = None  # workers to hold it; default 1


class WarmedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed. `replicas` counts workers that hold it now, at most as many as compute prompts."""

    id: str
    model: str
    replicas: int
    prompt_tokens: int  # of one copy
    usage: Usage  # of all copies
    pdgate: Served
    object: str = "prefix.warmed"


class StartedWarming(msgspec.Struct, frozen=True, kw_only=True):
    """Copies that are being computed, and where the answer goes."""

    started: Started
    output: WholeAnswer


_decoder = msgspec.json.Decoder(WarmRequest)


class Warming:
    """Starts copies of prompts."""

    def __init__(
        self, starter: Starter, *, catalog: Catalog, models: Models, workshop: PromptWorkshop, chat: Chat, fleet: Fleet
    ) -> None:
        self._starter = starter
        self._currency = catalog.currency
        self._models = models
        self._workshop = workshop
        self._chat = chat
        self._fleet = fleet

    async def start(self, arrival: Arrival) -> StartedWarming:
        """Admit the copies and write them to the inbox. Raises one of contracts.errors."""
        asked = decode_body(arrival.body, _decoder)
        if (asked.messages is None) == (asked.prompt is None):
            raise BadRequest("Give either 'messages' or 'prompt'.", param="messages")
        model = self._models.servable(asked.model, body_bytes=len(arrival.body), sticky=arrival.session)
        ids = await self._ids(asked, model, arrival)
        copies = min(asked.replicas or 1, max(1, self._num_computing(model.pool)))
        work = Work(
            model=model,
            prompts=[ids] * copies,
            sampling=lambda _: Sampling(max_tokens=1, temperature=0.0),
            asked_tokens=1,
            prompt_only=True,
            prompt_field="messages" if asked.prompt is None else "prompt",
        )
        begun: list[Started] = []

        def body(_: object, event: UsageEvent) -> bytes:
            return msgspec.json.encode(self._warmed(arrival, begun[0], len(ids), event))

        output = WholeAnswer(body, num_samples=copies)
        joint = Joint(output, num_parts=copies, num_samples=1)
        started = await self._starter.start(arrival, work, joint.parts)
        begun.append(started)
        joint.bind(started.generations)
        return StartedWarming(started=started, output=output)

    async def _ids(self, asked: WarmRequest, model: Servable, arrival: Arrival) -> Sequence[int]:
        if asked.messages is not None:
            check_messages(asked.messages)
            check_tools(asked.tools, None)
            chat = ChatRequest(model=model.name, messages=asked.messages, tools=asked.tools)
            return await self._chat.encode(chat, body_bytes=len(arrival.body))
        context_tokens = model.model.context_tokens
        return await self._workshop.encode_text(
            model.prompt, asked.prompt or "", context_tokens=context_tokens, field="prompt"
        )

    def _num_computing(self, pool: str) -> int:
        """Return how many ready workers compute prompts: prefill workers, or unified ones where there are no pairs."""
        roles = [one.role for one in self._fleet.pool(pool).workers if one.state is WorkerState.READY]
        if Role.PREFILL in roles and Role.DECODE in roles:
            return roles.count(Role.PREFILL)
        return roles.count(Role.UNIFIED) or len(roles)

    def _warmed(self, arrival: Arrival, started: Started, prompt_tokens: int, event: UsageEvent) -> WarmedPrefix:
        events = [one.event for one in started.generations if one.event is not None]
        return WarmedPrefix(
            id=f"warm-{arrival.rid}",
            model=event.model,
            replicas=len({one.prefill_worker or one.decode_worker for one in events}),
            prompt_tokens=prompt_tokens,
            usage=usage_of(event),
            pdgate=served_of(event, Telling(self._currency, arrival.sees_workers)),
        )
