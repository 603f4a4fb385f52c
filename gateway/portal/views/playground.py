"""`/portal/playground`: a model tried in the browser, in the name of one of the organisation's keys."""

from functools import partial
from typing import Any

from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from contracts.errors import ServingError
from gateway.answers import Answers, StreamAnswer
from gateway.auth import Authenticator
from gateway.bodies import read_body
from gateway.chat import Chat
from gateway.errors import Edge
from gateway.outputs import EventStream
from gateway.portal.door import AnyRequest
from gateway.portal.figures import PATHS
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.starter import Starter

MAX_BYTES = 1024 * 1024
_BODY_TIMEOUT_S = 20.0


def playground_routes(
    desk: Desk, starter: Starter, chat: Chat, answers: Answers, auth: Authenticator, edge: Edge
) -> list[HTTPRouteHandler]:
    """Return the handlers of the playground. Errors of the stream's start are the API's own JSON."""

    # Functions: Litestar copies handlers of errors, and what a bound method holds cannot be copied.
    def refused(request: AnyRequest, error: ServingError) -> Response[Any]:
        return edge.serving_error(request, error)

    def failed(request: AnyRequest, error: Exception) -> Response[Any]:
        return edge.unexpected(request, error)

    @get("/portal/playground")
    async def get_playground(request: Request[Any, Any, Any]) -> Response[str]:
        """Show the form."""
        visit = await desk.enter(request, Right.PLAY)
        keys = [key for key in await desk.tenants.list_keys(visit.tenant) if key.state == "active"]
        names = await desk.names(visit.tenant)
        return desk.show(
            request,
            "playground",
            visit,
            keys=[(key.id, f"{key.name or key.prefix} ({names.of('project', key.project_id)})") for key in keys],
            models=[(name, await desk.price_of(name, visit.tenant)) for name in desk.catalog.models],
            paths=PATHS,
            chosen_key=request.query_params.get("key", ""),
            chosen_model=request.query_params.get("model", ""),
            prompt=request.query_params.get("prompt", ""),
        )

    @post(
        "/portal/playground/chat",
        status_code=200,
        request_max_body_size=None,
        exception_handlers={ServingError: refused, Exception: failed},
    )
    async def play(request: Request[Any, Any, Any]) -> ASGIResponse:
        """Answer a chat request of the page, as `/v1/chat/completions` answers it to the key."""
        visit = await desk.enter(request, Right.PLAY)
        desk.door.check_csrf(request, visit)
        find = partial(auth.find, visit.tenant, request.query_params.get("key", ""))
        key = await find()
        body = await read_body(request.receive, max_bytes=MAX_BYTES, timeout_s=_BODY_TIMEOUT_S)
        arrival = starter.arrive_here(key, body, "/v1/chat/completions", reload_key=find)
        request.scope["state"]["rid"] = arrival.rid
        asked = await chat.start(arrival)
        if isinstance(asked.output, EventStream):
            return StreamAnswer(asked.started, asked.output.writer, answers)
        return await answers.whole(asked.started, asked.output, request.receive)

    return [get_playground, play]
