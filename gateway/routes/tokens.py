"""`POST /v1/tokenize` and `POST /v1/detokenize`."""

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler

from contracts.errors import BadRequest
from gateway.models import Models
from gateway.openapi import json_operation
from gateway.prompt import PromptWorkshop
from gateway.schemas.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    decode_detokenize,
    decode_tokenize,
)
from gateway.starter import Starter


def token_routes(starter: Starter, models: Models, workshop: PromptWorkshop) -> list[HTTPRouteHandler]:
    """Return the handlers of tokens."""

    @post(
        "/v1/tokenize",
        status_code=200,
        summary="Turn text into token ids",
        operation_id="tokenize",
        tags=["tokens"],
        operation_class=json_operation(TokenizeRequest, Tokenized),
        request_max_body_size=None,
    )
    async def tokenize(request: Request[Any, Any, Any]) -> Tokenized:
        """Return the ids that a prompt or a conversation has with this model. Free of charge."""
        arrival = await starter.arrive(request, confirm=True)
        asked = decode_tokenize(arrival.body)
        prompt, model = models.tokenizer(asked.model)
        if asked.messages is not None:
            ids = await workshop.encode(
                prompt, asked.messages, body_bytes=len(arrival.body), context_tokens=model.context_tokens
            )
        else:
            ids = await workshop.encode_text(
                prompt,
                asked.prompt or "",
                context_tokens=model.context_tokens,
                field="prompt",
                add_special_tokens=asked.add_special_tokens is not False,
            )
        texts = prompt.token_texts(ids) if asked.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=model.context_tokens, tokens=ids, token_strs=texts)

    @post(
        "/v1/detokenize",
        status_code=200,
        summary="Turn token ids into text",
        operation_id="detokenize",
        tags=["tokens"],
        operation_class=json_operation(DetokenizeRequest, Detokenized),
        request_max_body_size=None,
    )
    async def detokenize(request: Request[Any, Any, Any]) -> Detokenized:
        """Return the text of token ids of this model. Free of charge."""
        asked = decode_detokenize((await starter.arrive(request, confirm=True)).body)
        prompt, _ = models.tokenizer(asked.model)
        if any(one >= prompt.vocabulary for one in asked.tokens):
            raise BadRequest(f"Token ids of '{asked.model}' are below {prompt.vocabulary}.", param="tokens")
        return Detokenized(prompt=await workshop.decode(prompt, asked.tokens))

    return [tokenize, detokenize]
