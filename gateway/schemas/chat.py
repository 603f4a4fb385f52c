"""The body of `POST /v1/chat/completions`: strict on what is known, lenient on what is not, like OpenAI.

Unknown fields are ignored. Fields that would change the answer and are not supported are refused by
name, so that nobody gets an answer to another question than the one asked.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from contracts.catalog import Model
from contracts.errors import BadRequest
from contracts.parsing import Grammar
from contracts.wire import Sampling
from gateway.schemas.conversation import Message, check_messages
from gateway.schemas.decoding import MAX_SAMPLES, decode_body, stops_of
from gateway.schemas.tools import ResponseFormat, Tool, ToolChoice, check_tools, grammar_of, top_logprobs_of

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion request. A field that is null counts as absent, as with OpenAI."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # beyond OpenAI, under the names that SGLang and vLLM have for them:
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=64)] | None = None
    regex: str | None = None
    ebnf: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # refused by name unless they ask for nothing:
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    verbosity: str | None = None
    web_search_options: Any = None

    @property
    def num_samples(self) -> int:
        """Return how many answers are asked for."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with a usage chunk."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def asked_tokens(self) -> int | None:
        """Return the most tokens the client wants per sample, or None if it did not say."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return stops_of(self.stop)

    @property
    def grammar(self) -> Grammar | None:
        """Return what the answer must match."""
        return grammar_of(self.response_format, regex=self.regex, ebnf=self.ebnf)

    def sampling(
        self, max_tokens: int, model: Model, *, logit_bias: Mapping[int, float] = MappingProxyType({})
    ) -> Sampling:
        """Return the sampling parameters with their effective maximum and, where none is named, the model's own."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=model.default_temperature if self.temperature is None else self.temperature,
            top_p=model.default_top_p if self.top_p is None else self.top_p,
            stop=self.stops,
            seed=self.seed,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
            repetition_penalty=self.repetition_penalty,
            top_k=self.top_k or None,
            min_p=self.min_p or None,
            min_tokens=min(self.min_tokens, max_tokens) if self.min_tokens else None,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            top_logprobs=top_logprobs_of(self.logprobs, self.top_logprobs),
            logit_bias=dict(logit_bias),
            grammar=self.grammar,
        )


_decoder = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        BadRequest: not JSON, or a field that is missing, wrong or unsupported; `param` names it.
    """
    request = decode_body(body, _decoder)
    stops_of(request.stop)
    check_messages(request.messages)
    check_tools(request.tools, request.tool_choice)
    top_logprobs_of(request.logprobs, request.top_logprobs)
    is_forced = request.tool_choice not in (None, "none", "auto")
    if request.grammar is not None and is_forced:
        raise BadRequest("A forced tool call and a response format exclude each other.", param="tool_choice")
    if request.asked_tokens is not None and (request.min_tokens or 0) > request.asked_tokens:
        raise BadRequest(
            f"'min_tokens' is {request.min_tokens}, more than the {request.asked_tokens} tokens of the answer.",
            param="min_tokens",
        )
    _check_metadata(request)
    _check_supported(request)
    return request


def _check_metadata(request: ChatRequest) -> None:
    metadata = request.metadata or {}
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise BadRequest(
            "'metadata' takes up to 16 pairs, keys up to 64 and values up to 512 characters.", param="metadata"
        )


def _check_supported(request: ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("'stream_options' is only allowed with 'stream': true.", param="stream_options")
    unsupported = {
        "functions": bool(request.functions),
        "function_call": request.function_call not in (None, "none", "auto"),
        "modalities": request.modalities not in (None, [], ["text"]),
        "audio": request.audio is not None,
        "prediction": request.prediction is not None,
        "web_search_options": request.web_search_options is not None,
    }
    for field, asked in unsupported.items():
        if asked:
            raise BadRequest(f"'{field}' is not supported yet.", param=field)
