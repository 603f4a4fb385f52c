"""Bodies of `POST /v1/tokenize` and `POST /v1/detokenize`."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from contracts.errors import BadRequest
from gateway.schemas.completions import TokenId
from gateway.schemas.conversation import Message
from gateway.schemas.decoding import decode_body

MAX_IDS = 1_000_000


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or a conversation for the model's chat template."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # default: as the tokenizer does for a text, never for a conversation
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of a model."""

    model: str
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_IDS)]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids."""

    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Return the request in a body. Raises BadRequest."""
    request = decode_body(body, _tokenize)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("Give either 'prompt' or 'messages'.", param="prompt")
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """Return the request in a body. Raises BadRequest."""
    return decode_body(body, _detokenize)
