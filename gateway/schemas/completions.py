"""The body of `POST /v1/completions` and its answer: OpenAI's legacy form."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from contracts.catalog import Model
from contracts.errors import BadRequest
from contracts.parsing import TokenLogprob
from contracts.usage import UsageEvent
from contracts.wire import Sampling
from gateway.samples import Sample
from gateway.schemas.answers import Served, Telling, Usage, served_of, usage_of
from gateway.schemas.chat import Count, Penalty, Probability, StreamOptions
from gateway.schemas.decoding import MAX_SAMPLES, decode_body, refuse_unsupported, stops_of

DEFAULT_MAX_TOKENS: Final = 16  # as with OpenAI
MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 5

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion request. A field that is null counts as absent, as with OpenAI."""

    model: str
    prompt: str | list[str | TokenId | list[TokenId]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # refused by name unless they ask for nothing:
    best_of: int | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def num_samples(self) -> int:
        """Return how many answers are asked for, per prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with a usage chunk."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def asked_tokens(self) -> int:
        """Return the most tokens per sample."""
        return self.max_tokens or DEFAULT_MAX_TOKENS

    def prompts(self) -> Sequence[str | list[int]]:
        """Return each prompt: text or token ids. Raises BadRequest."""
        given = self.prompt
        if isinstance(given, str):
            found: list[str | list[int]] = [given]
        elif given and all(isinstance(item, int) for item in given):
            found = [[item for item in given if isinstance(item, int)]]
        elif any(isinstance(item, int) for item in given):
            raise BadRequest("'prompt' is a text, texts, token ids, or lists of token ids.", param="prompt")
        else:
            found = [item for item in given if not isinstance(item, int)]
        if not found or not all(found):
            raise BadRequest("'prompt' must not be empty.", param="prompt")
        if len(found) * self.num_samples > MAX_CHOICES:
            raise BadRequest(f"One request may ask for {MAX_CHOICES} answers: prompts times 'n'.", param="prompt")
        return found

    def sampling(self, max_tokens: int, model: Model) -> Sampling:
        """Return the sampling parameters with their effective maximum and, where none is named, the model's own."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=model.default_temperature if self.temperature is None else self.temperature,
            top_p=model.default_top_p if self.top_p is None else self.top_p,
            stop=stops_of(self.stop),
            seed=self.seed,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
            top_logprobs=self.logprobs,
        )


class LegacyLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities in four lists of one entry per token."""

    text_offset: Sequence[int]
    token_logprobs: Sequence[float]
    tokens: Sequence[str]
    top_logprobs: Sequence[Mapping[str, float]] | None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one prompt: index = prompt's index times n plus sample."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: LegacyLogprobs | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion."""

    id: str
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: Usage
    pdgate: Served
    object: str = "text_completion"


def legacy_logprobs(tokens: Sequence[TokenLogprob], *, first_offset: int = 0) -> LegacyLogprobs | None:
    """Return log probabilities in the legacy form, None when there are none. `first_offset` is in characters."""
    if not tokens:
        return None
    texts = [token.token.decode("utf-8", "replace") for token in tokens]
    offsets = [first_offset, *itertools.accumulate(map(len, texts), initial=first_offset)][1:-1]
    return LegacyLogprobs(
        text_offset=offsets,
        token_logprobs=[token.logprob for token in tokens],
        tokens=texts,
        top_logprobs=[{other.token.decode("utf-8", "replace"): other.logprob for other in t.top} for t in tokens]
        if any(token.top for token in tokens)
        else None,
    )


def completion_of(
    head: Mapping[str, Any], samples: Sequence[Sample], event: UsageEvent, *, echoed: Sequence[str], telling: Telling
) -> Completion:
    """Return a whole completion; `head` has id, created and model."""
    choices = [
        CompletionChoice(
            index=index,
            text=echoed[index] + sample.text,
            finish_reason=sample.reason,
            logprobs=legacy_logprobs(sample.logprobs, first_offset=len(echoed[index])),
        )
        for index, sample in enumerate(samples)
    ]
    return Completion(
        id=head["id"],
        created=head["created"],
        model=head["model"],
        choices=choices,
        usage=usage_of(event),
        pdgate=served_of(event, telling),
    )


_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Return the request in a body.

    Raises:
        BadRequest: not JSON, or a field that is missing, wrong or unsupported; `param` names it.
    """
    request = decode_body(body, _decoder)
    if request.stream_options is not None and not request.stream:
        raise BadRequest("'stream_options' is only allowed with 'stream': true.", param="stream_options")
    stops_of(request.stop)
    refuse_unsupported(
        {
            "suffix": bool(request.suffix),
            "best_of": request.best_of not in (None, request.num_samples),
            "logit_bias": bool(request.logit_bias),
        }
    )
    if request.echo and request.logprobs is not None:
        raise BadRequest("'logprobs' of an echoed prompt are not supported.", param="logprobs")
    return request
