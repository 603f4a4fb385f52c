"""The edge: every error of an HTTP request leaves as an OpenAI error body with the right status."""

import math
from typing import Any, Final

import msgspec
import sqlalchemy as sa
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException

from contracts.errors import BadRequest, BodyTooLarge, DependencyDown, NotFound, ServingError, openai_body
from gateway.methods import allowed_methods
from gateway.schemas.messages import anthropic_body
from observability.metrics import Instruments

log = structlog.get_logger()

ANTHROPIC_PATH: Final = "/v1/messages"

_UNSERVED: Final = {
    "/v1/embeddings": "Embeddings",
    "/v1/images": "Pictures",
    "/v1/audio": "Audio requests",
    "/v1/realtime": "Audio requests",
    "/v1/videos": "Videos",
    "/v1/moderations": "Moderations",
    "/v1/fine_tuning": "Fine-tuning jobs",
    "/v1/assistants": "Assistants",
    "/v1/threads": "Assistants",
    "/v1/vector_stores": "Vector stores",
    "/v1/rerank": "Rerankings",
}
"""Paths that clients know from elsewhere and that are told apart from misspelt ones."""


class MethodNotAllowed(ServingError):
    """The path exists, not with this method."""

    code, type, http_status = "method_not_allowed", "invalid_request_error", 405


def error_headers(error: ServingError) -> dict[str, str]:
    """Return the error's own headers, `retry-after` and `x-should-retry` as it wants them."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    return headers


def error_response(error: ServingError, *, rid: str | None, anthropic: bool = False) -> Response[bytes]:
    """Return the HTTP form of an error: OpenAI's, or Anthropic's."""
    headers = error_headers(error)
    if rid is not None:
        headers["x-request-id"] = rid
        if anthropic:
            headers["request-id"] = rid
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(anthropic_body(error, rid) if anthropic else openai_body(error)),
        status_code=error.http_status,
        media_type="application/json",
        headers=headers,
    )


def rid_of(request: Request[Any, Any, Any]) -> str | None:
    """Return the request id that the handler minted, if it came that far."""
    rid = request.scope["state"].get("rid")
    return rid if isinstance(rid, str) else None


class Edge:
    """Translates every error of an HTTP request, and counts it."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments

    def serving_error(self, request: Request[Any, Any, Any], error: ServingError) -> Response[bytes]:
        """Translate one of ours."""
        status = str(error.http_status)
        route = str(request.scope.get("path_template") or "unknown")
        self._instruments.requests.add(1, {"route": route, "status": status, "model": ""})
        self._instruments.refusals.add(1, {"reason": error.code, "status": status})
        anthropic = request.url.path.startswith(ANTHROPIC_PATH)
        return error_response(error, rid=rid_of(request), anthropic=anthropic)

    def http_error(self, request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
        """Translate one of Litestar's: no such route, wrong method, body too large."""
        match error.status_code:
            case 404:
                ours: ServingError = NotFound(_unknown(request.method, request.url.path))
            case 405:
                ours = MethodNotAllowed(f"{request.method} is not allowed for {request.url.path}.")
                ours.headers = {"allow": ", ".join(allowed_methods(request.app, request.url.path))}
            case 413:
                ours = BodyTooLarge("The request body is larger than this server reads.")
            case status if status < 500:
                ours = BadRequest(error.detail)
            case _:
                return self.unexpected(request, error)
        return self.serving_error(request, ours)

    def database_error(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """Translate a database that does not answer; what it refuses for its content is a fault of ours."""
        if isinstance(error, sa.exc.DataError | sa.exc.IntegrityError | sa.exc.ProgrammingError):
            return self.unexpected(request, error)
        log.warning("database_unavailable", path=request.url.path, error=str(error))
        down = DependencyDown("The database cannot be reached right now.", retry_after_s=2)
        return self.serving_error(request, down)

    def no_such_tenant(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """Translate an id that is unknown, or another tenant's."""
        return self.serving_error(request, NotFound(f"Not found: {error}."))

    def unexpected(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """Translate a fault of ours: logged in full, told in one sentence."""
        rid = rid_of(request)
        log.error("request_failed", rid=rid, path=request.url.path, exc_info=error)
        return self.serving_error(request, ServingError(f"The server failed on this request. Request id: {rid}."))


def _unknown(method: str, path: str) -> str:
    for prefix, what in _UNSERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f"{what} are not served here: this is a gateway for text. Its endpoints are described at /schema."
    return f"Unknown request URL: {method} {path}."
