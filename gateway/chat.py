"""One chat completion from the body to its output."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from contracts.catalog import Catalog
from contracts.dimensions import MAX_NAME, dimensions
from contracts.errors import BadRequest
from contracts.usage import UsageEvent
from gateway.models import Models
from gateway.outputs import EventStream, WholeAnswer
from gateway.prompt import PromptWorkshop
from gateway.samples import Sample
from gateway.schemas.answers import ChatCompletion, Telling, served_of, usage_of
from gateway.schemas.chat import ChatRequest, decode_chat
from gateway.schemas.choices import choice_of
from gateway.schemas.conversation import Message
from gateway.schemas.plain_tools import HERMES, told_of_tools
from gateway.schemas.tools import biases_of, called_tools, parsing_of
from gateway.scopes import local_consent
from gateway.sse import SIMULATED, ChunkTemplate
from gateway.starter import Arrival, Started, Starter, Work
from gateway.writer import EventWriter

_NO_REASONING: Final = frozenset({None, "none"})


class StartedChat(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion that runs, and where its answer goes."""

    started: Started
    output: EventStream | WholeAnswer


class Chat:
    """Starts chat completions."""

    def __init__(self, starter: Starter, *, catalog: Catalog, models: Models, workshop: PromptWorkshop) -> None:
        self._starter = starter
        self._currency = catalog.currency
        self._models = models
        self._workshop = workshop

    async def start(self, arrival: Arrival) -> StartedChat:
        """Admit a request and write it to the inbox. Raises one of contracts.errors."""
        chat = decode_chat(arrival.body)
        work = await self.work(chat, arrival)
        output = self._output(chat, arrival, work.model.name)
        return StartedChat(started=await self._starter.start(arrival, work, [output]), output=output)

    async def encode(self, chat: ChatRequest, *, body_bytes: int) -> Sequence[int]:
        """Return the token ids of a conversation. Raises one of contracts.errors."""
        prompt, model = self._models.tokenizer(chat.model)
        tools = [msgspec.to_builtins(tool) for tool in called_tools(chat.tools, chat.tool_choice)]
        messages: Sequence[Message] = chat.messages
        if "tools" not in prompt.variables and model.tool_parser in HERMES:
            messages = told_of_tools(messages, tools)
        return await self._workshop.encode(
            prompt,
            messages,
            body_bytes=body_bytes,
            context_tokens=model.context_tokens,
            tools=tools,
            extras=template_extras(chat, prompt.variables),
        )

    async def work(self, chat: ChatRequest, arrival: Arrival, *, body_bytes: int | None = None) -> Work:
        """Return what a chat request wants generated. Raises one of contracts.errors.

        `body_bytes` is the size of the conversation where it is not that of the body.
        """
        model = self._models.servable(
            chat.model,
            body_bytes=body_bytes or len(arrival.body),
            local=local_consent(arrival.key.bounds),
            sticky=arrival.session or chat.prompt_cache_key or chat.user,
        )
        if chat.model != model.name:  # an alias, or a route: from here on the model that serves
            chat = msgspec.structs.replace(chat, model=model.name)
        biases = biases_of(chat.logit_bias, vocabulary=model.prompt.vocabulary)
        extras = template_extras(chat, model.prompt.variables)
        return Work(
            model=model,
            prompts=[await self.encode(chat, body_bytes=body_bytes or len(arrival.body))],
            sampling=lambda max_tokens: chat.sampling(max_tokens, model.model, logit_bias=biases),
            parsing=parsing_of(
                model.name,
                model.model,
                tools=chat.tools,
                choice=chat.tool_choice,
                parallel=chat.parallel_tool_calls,
                reasoning_open=bool(model.model.reasoning_parser) and model.prompt.opens_reasoning(extras),
            ),
            asked_tokens=chat.asked_tokens,
            num_samples=chat.num_samples,
            stream=bool(chat.stream),
            tier=chat.service_tier,
            session=(chat.prompt_cache_key or chat.user or "")[:MAX_NAME],
            dimensions=dimensions(
                user=chat.user,
                safety_identifier=chat.safety_identifier,
                reference=arrival.reference,
                metadata=chat.metadata,
            ),
        )

    def _output(self, chat: ChatRequest, arrival: Arrival, model: str) -> EventStream | WholeAnswer:
        if not chat.stream:
            return WholeAnswer(partial(self._body, arrival, model), num_samples=chat.num_samples)
        template = ChunkTemplate(
            chunk_id=f"chatcmpl-{arrival.rid}",
            created_s=arrival.created_s,
            model=model,
            num_samples=chat.num_samples,
            with_usage=chat.wants_usage,
            fingerprint=SIMULATED if self._models.simulated(model) else "",
        )
        return EventStream(
            EventWriter(asyncio.get_running_loop()),
            template,
            num_samples=chat.num_samples,
            with_usage=chat.wants_usage,
            telling=Telling(self._currency, arrival.sees_workers),
        )

    def _body(self, arrival: Arrival, model: str, samples: Sequence[Sample], event: UsageEvent) -> bytes:
        body = ChatCompletion(
            id=f"chatcmpl-{arrival.rid}",
            created=arrival.created_s,
            model=model,
            choices=[choice_of(index, sample) for index, sample in enumerate(samples)],
            usage=usage_of(event),
            pdgate=served_of(event, Telling(self._currency, arrival.sees_workers)),
        )
        return msgspec.json.encode(body)


def template_extras(chat: ChatRequest, variables: frozenset[str]) -> dict[str, Any]:
    """Return the template's variables that a request sets, of those that it reads.

    Raises:
        BadRequest: an effort for a model whose template knows none.
    """
    extras = {name: value for name, value in (chat.chat_template_kwargs or {}).items() if name in variables}
    effort = chat.reasoning_effort
    if effort is None:
        return extras
    if "reasoning_effort" in variables:
        extras["reasoning_effort"] = effort
    switches = variables & {"enable_thinking", "thinking"}
    extras |= dict.fromkeys(switches, effort not in _NO_REASONING)
    if not switches and "reasoning_effort" not in variables and effort not in _NO_REASONING:
        raise BadRequest(f"'reasoning_effort' is not supported by the model '{chat.model}'.", param="reasoning_effort")
    return extras
