"""One taxonomy of errors, grouped by what the caller can do. Translated once per edge.

The OpenAI SDK retries 408, 409, 429 and 5xx by itself, so a wrong status multiplies load.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

MAX_MESSAGE: Final = 2000
"""Characters of a message: what a client sent is quoted in some, and it may be long."""


class ServingError(Exception):
    """Base of all errors a client may see. `retry_after_s` is a hint, None = do not say."""

    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    should_retry: ClassVar[bool | None] = None  # sets x-should-retry when not None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers: Mapping[str, str] = {}  # beside those that follow from the fields above


# -- the caller must change the request ------------------------------------------------------------


class BadRequest(ServingError):
    """A field is missing, unknown or out of range; `param` names it."""

    code, type, http_status = "invalid_request", "invalid_request_error", 400


class ContextTooLong(ServingError):
    """The prompt leaves no room in the model's context."""

    code, type, http_status = "context_length_exceeded", "invalid_request_error", 400

    def __init__(
        self, *, prompt_tokens: int, limit_tokens: int, at_least: bool = False, param: str = "messages"
    ) -> None:
        """`at_least`: `prompt_tokens` is a lower bound, since a prompt that long is not counted to its end."""
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens; your {param}"
            f" {'has' if param == 'prompt' else 'are' if param == 'messages' else 'is'}"
            f"{' at least' if at_least else ''} {prompt_tokens} tokens. Shorten the {param}.",
            param=param,
        )


class BodyTooLarge(ServingError):
    """More bytes than the gateway reads."""

    code, type, http_status = "request_too_large", "invalid_request_error", 413


class RequestTimeout(ServingError):
    """The request did not come to its end in time."""

    code, type, http_status = "request_timeout", "invalid_request_error", 408
    should_retry = False


class UnsupportedEncoding(ServingError):
    """The body is compressed."""

    code, type, http_status = "unsupported_encoding", "invalid_request_error", 415


class ModelNotFound(ServingError):
    """No such model, or none this key may use."""

    code, type, http_status = "model_not_found", "invalid_request_error", 404

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model}' does not exist or you do not have access to it.", param="model")


class NotFound(ServingError):
    """No such thing for this caller."""

    code, type, http_status = "not_found", "invalid_request_error", 404


class InvalidApiKey(ServingError):
    """No key, an unknown one, an expired one or a revoked one."""

    code, type, http_status = "invalid_api_key", "invalid_request_error", 401


class PermissionDenied(ServingError):
    """The key is valid and may not do this."""

    code, type, http_status = "permission_denied", "invalid_request_error", 403


# -- the caller must wait or pay ---------------------------------------------------------------------


class RateLimited(ServingError):
    """The caller's own limit; waiting helps."""

    code, type, http_status = "rate_limit_exceeded", "rate_limit_error", 429


class InsufficientQuota(ServingError):
    """Budget or credit used up; waiting does not help."""

    code, type, http_status = "insufficient_quota", "insufficient_quota", 429
    should_retry = False


# -- our side ------------------------------------------------------------------------------------------


class NoCapacity(ServingError):
    """We cannot serve this now: no worker, a full inbox, or a queue longer than the deadline."""

    code, type, http_status = "no_capacity", "server_error", 503


class DependencyDown(ServingError):
    """Redis or Postgres is away and this call may not go on without it."""

    code, type, http_status = "dependency_unavailable", "server_error", 503


class Interrupted(ServingError):
    """The answer broke off through our fault; the tenant pays nothing."""

    code, type, http_status = "interrupted", "server_error", 500


class DeadlineExceeded(ServingError):
    """The request's deadline passed."""

    code, type, http_status = "deadline_exceeded", "server_error", 504


def openai_body(error: ServingError) -> Mapping[str, Mapping[str, str | None]]:
    """Return the OpenAI error object of `error`."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
