"""Legacy completions: prompts as text or token ids, continued by the model without a chat template."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from contracts.catalog import Catalog
from contracts.dimensions import MAX_NAME, dimensions
from contracts.errors import BadRequest, ServingError, openai_body
from contracts.lifecycle import FinishReason
from contracts.parsing import Detail
from contracts.usage import UsageEvent
from gateway.joint import Joint
from gateway.models import Models, Servable
from gateway.outputs import Output, WholeAnswer
from gateway.prompt import PromptWorkshop
from gateway.schemas.answers import Telling, served_of, usage_of
from gateway.schemas.completions import (
    CompletionRequest,
    completion_of,
    decode_completion,
    legacy_logprobs,
)
from gateway.scopes import local_consent
from gateway.sse import DONE, SIMULATED, encode_text, error_event
from gateway.starter import Arrival, Started, Starter, Work
from gateway.writer import EventWriter

_SUFFIX: Final = b',"logprobs":null,"finish_reason":null}]'


class StartedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion that runs, and where its answer goes."""

    started: Started
    output: "CompletionStream | WholeAnswer"


class Completions:
    """Starts completions."""

    def __init__(self, starter: Starter, *, catalog: Catalog, models: Models, workshop: PromptWorkshop) -> None:
        self._starter = starter
        self._currency = catalog.currency
        self._models = models
        self._workshop = workshop

    async def start(self, arrival: Arrival) -> StartedCompletion:
        """Admit a request and write it to the inbox. Raises one of contracts.errors."""
        asked = decode_completion(arrival.body)
        prompts = asked.prompts()
        model = self._models.servable(
            asked.model,
            body_bytes=len(arrival.body),
            local=local_consent(arrival.key.bounds),
            sticky=arrival.session or asked.prompt_cache_key or asked.user,
        )
        ids = [await self._ids(model, prompt) for prompt in prompts]
        echoed = [await self._text(model, prompt) for prompt in prompts] if asked.echo else [""] * len(prompts)
        work = Work(
            model=model,
            prompts=ids,
            sampling=lambda max_tokens: asked.sampling(max_tokens, model.model),
            asked_tokens=asked.asked_tokens,
            num_samples=asked.num_samples,
            stream=bool(asked.stream),
            tier=asked.service_tier,
            session=(asked.prompt_cache_key or asked.user or "")[:MAX_NAME],
            prompt_field="prompt",
            dimensions=dimensions(user=asked.user, safety_identifier=None, reference=arrival.reference, metadata=None),
        )
        output = self._output(asked, arrival, model.name, [text for text in echoed for _ in range(asked.num_samples)])
        if len(ids) == 1:
            outputs: Sequence[Output] = [output]
            started = await self._starter.start(arrival, work, outputs)
        else:
            joint = Joint(output, num_parts=len(ids), num_samples=asked.num_samples)
            started = await self._starter.start(arrival, work, joint.parts)
            joint.bind(started.generations)
        return StartedCompletion(started=started, output=output)

    async def _ids(self, model: Servable, prompt: str | list[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            ids = await self._workshop.encode_text(
                model.prompt, prompt, context_tokens=model.model.context_tokens, field="prompt"
            )
            if not ids:
                raise BadRequest("'prompt' must not be empty.", param="prompt")
            return ids
        unknown = next((one for one in prompt if one >= model.prompt.vocabulary), None)
        if unknown is not None:
            raise BadRequest(
                f"Token id {unknown} is not in the vocabulary of '{model.name}', which has {model.prompt.vocabulary}.",
                param="prompt",
            )
        return prompt

    async def _text(self, model: Servable, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else await self._workshop.decode(model.prompt, prompt)

    def _output(
        self, asked: CompletionRequest, arrival: Arrival, model: str, echoed: Sequence[str]
    ) -> "CompletionStream | WholeAnswer":
        head: dict[str, Any] = {
            "id": f"cmpl-{arrival.rid}",
            "object": "text_completion",
            "created": arrival.created_s,
            "model": model,
        }
        telling = Telling(self._currency, arrival.sees_workers)
        if not asked.stream:
            return WholeAnswer(
                lambda samples, event: msgspec.json.encode(
                    completion_of(head, samples, event, echoed=echoed, telling=telling)
                ),
                num_samples=len(echoed),
            )
        if self._models.simulated(model):
            head["system_fingerprint"] = SIMULATED
        return CompletionStream(
            EventWriter(asyncio.get_running_loop()),
            head,
            echoed=echoed,
            with_usage=asked.wants_usage,
            telling=telling,
        )


class CompletionStream:
    """A completion as server-sent events, framed for a writer."""

    def __init__(
        self,
        writer: EventWriter,
        head: Mapping[str, object],
        *,
        echoed: Sequence[str],
        with_usage: bool,
        telling: Telling,
    ) -> None:
        """`echoed` is what each choice begins with: the prompt's text, or nothing."""
        self.writer = writer
        self._pending = writer.pending
        self._open = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._usage = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._prefix = [self._open + b'{"index":%d,"text":' % index for index in range(len(echoed))]
        self._suffix = _SUFFIX + self._usage
        self._echoed = list(echoed)
        self._offsets = [0] * len(echoed)  # of text before the next chunk, counted when there are log probabilities
        self._with_usage = with_usage
        self._telling = telling

    @property
    def first_sent_s(self) -> float | None:
        """When the first token left for the client, on the loop's clock."""
        return self.writer.first_sent_s

    def placed(self) -> None:
        """Release the head of the response."""
        self.writer.release_head()

    def piece(self, sample: int, text: str) -> None:
        """Append one chunk; `flush` sends it. The hot path: once per token."""
        echoed = self._echoed[sample]
        if echoed:
            text, self._echoed[sample] = echoed + text, ""
        self.writer.spoken = True
        if text:
            pending = self._pending
            pending.append(self._prefix[sample])
            pending.append(encode_text(text))
            pending.append(self._suffix)

    def flush(self) -> None:
        """Send what is pending."""
        self.writer.flush()

    def detailed(self, sample: int, text: str, detail: Detail) -> None:
        """Append a chunk with log probabilities. What a chat would set apart belongs to the text here."""
        self._offsets[sample] += len(self._echoed[sample])
        logprobs = legacy_logprobs(detail.logprobs, first_offset=self._offsets[sample])
        self._offsets[sample] += len(text)
        text, self._echoed[sample] = self._echoed[sample] + text, ""
        self.writer.spoken = True
        if text or logprobs:
            middle = b',"logprobs":%b,"finish_reason":null}]' % msgspec.json.encode(logprobs)
            self._pending.append(self._prefix[sample] + encode_text(text) + middle + self._usage)

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:  # noqa: ARG002 - not told here
        """Append the chunk with the finish reason; `flush` sends it."""
        self.piece(sample, "")
        tail = b'"","logprobs":null,"finish_reason":%b}]' % encode_text(reason)
        self._pending.append(self._prefix[sample] + tail + self._usage)

    def succeeded(self, event: UsageEvent) -> None:
        """Send the usage, if asked for, and [DONE]."""
        if self._with_usage:
            usage, served = usage_of(event), served_of(event, self._telling)
            tail = b'],"usage":%b,"pdgate":%b}\n\n' % (msgspec.json.encode(usage), msgspec.json.encode(served))
            self._pending.append(self._open + tail)
        self._pending.append(DONE)
        self.writer.close()

    def failed(self, error: ServingError) -> None:
        """Send the error, or give it to whoever holds the head."""
        self.writer.fail(error, error_event(openai_body(error)))

    def abandoned(self) -> None:
        """Stop: nobody reads any more."""
        self.writer.leave()

    def tick(self, now_s: float) -> None:
        """Send a comment after a long silence."""
        self.writer.tick(now_s)
