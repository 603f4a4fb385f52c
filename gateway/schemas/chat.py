"""The body of `POST /v1/chat/completions`: strict on what is known, lenient on what is not, like OpenAI.

Unknown fields are ignored. Fields that would change the answer and are not supported are refused by
name, so that nobody gets an answer to another question than the one asked.
"""

from typing import Annotated, Any, Literal

import msgspec

from contracts.catalog import Model
from contracts.errors import BadRequest
from contracts.wire import Sampling
from gateway.schemas.decoding import MAX_SAMPLES, decode_body, stops_of

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A piece of text in a message."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """A picture: recognised in order to be refused by name."""


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    """A sound: recognised in order to be refused by name."""


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    """A file: recognised in order to be refused by name."""


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """What an assistant refused with, sent back as history."""

    refusal: str


Part = TextPart | ImagePart | AudioPart | FilePart | RefusalPart


class Message(msgspec.Struct, frozen=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Only `text` is supported."""

    type: str


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
    # refused by name unless they ask for nothing:
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
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

    def sampling(self, max_tokens: int, model: Model) -> Sampling:
        """Return the sampling parameters with their effective maximum and, where none is named, the model's own."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=model.default_temperature if self.temperature is None else self.temperature,
            top_p=model.default_top_p if self.top_p is None else self.top_p,
            stop=self.stops,
            seed=self.seed,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
        )


_decoder = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        BadRequest: not JSON, or a field that is missing, wrong or unsupported; `param` names it.
    """
    request = decode_body(body, _decoder)
    stops_of(request.stop)
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
        "tools": bool(request.tools),
        "tool_choice": request.tool_choice not in (None, "none", "auto"),
        "functions": bool(request.functions),
        "function_call": request.function_call not in (None, "none", "auto"),
        "response_format": request.response_format is not None and request.response_format.type != "text",
        "logprobs": bool(request.logprobs),
        "top_logprobs": bool(request.top_logprobs),
        "logit_bias": bool(request.logit_bias),
        "modalities": request.modalities not in (None, [], ["text"]),
        "audio": request.audio is not None,
        "prediction": request.prediction is not None,
        "web_search_options": request.web_search_options is not None,
    }
    for field, asked in unsupported.items():
        if asked:
            raise BadRequest(f"'{field}' is not supported yet.", param=field)
    for i, message in enumerate(request.messages):
        if message.tool_calls:
            raise BadRequest("'tool_calls' is not supported yet.", param=f"messages[{i}].tool_calls")
        if message.content is None and message.role != "assistant":
            raise BadRequest("This message needs content.", param=f"messages[{i}].content")
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if isinstance(part, ImagePart | AudioPart | FilePart):
                    raise BadRequest(
                        "Only text is supported: this model takes no images, audio or files.",
                        param=f"messages[{i}].content[{j}]",
                    )


def text_of(message: Message) -> str:
    """Return the text of a message, its parts joined."""
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return "".join(
        part.text if isinstance(part, TextPart) else getattr(part, "refusal", "") for part in message.content
    )
