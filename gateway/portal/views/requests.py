"""`/portal/requests`: the log of requests, one request with its timeline, and what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from billing import queries
from contracts.errors import BadRequest
from gateway.admin.text_routes import TextDesk
from gateway.portal.figures import PATHS
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk, Names
from gateway.portal.views.ranges import CHOICES, range_of
from gateway.portal.views.texts import readable, talk_of
from gateway.schemas.answers import RequestTimings, RequestView

PAGE: Final = 50
_WIDTH: Final = 1000.0  # of the timeline, in units of its own
_OUTCOMES: Final = {
    "finished": "Finished",
    "client_left": "Client left",
    "interrupted": "Interrupted",
    "refused": "Refused",
    "lost": "Lost",
}


class RowTokens(msgspec.Struct, frozen=True):
    """Tokens of one row."""

    prompt: int
    cached: int
    decode: int


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a request's time; `share` 0 to 1, `x` and `width` in the timeline's units."""

    name: str
    words: str
    from_ms: float
    took_ms: float
    share: float

    @property
    def x(self) -> float:
        """Where it starts."""
        total_ms = self.took_ms / self.share if self.share else 0.0
        return round(self.from_ms / total_ms * _WIDTH, 2) if total_ms else 0.0

    @property
    def width(self) -> float:
        """How wide it is."""
        return round(self.share * _WIDTH, 2)


def meters_of(row: queries.RequestRow) -> RowTokens:
    """Return the tokens of a request by what a reader asks for."""
    tokens = {one.meter: one.tokens for one in row.meters}
    cached = tokens.get("prefill_cached", 0)
    return RowTokens(tokens.get("prefill_computed", 0) + cached, cached, tokens.get("decode", 0))


def stages_of(seen: RequestTimings | None) -> Sequence[Stage]:
    """Return the stages of a request in their order; what the first token waited for beyond them is prefill."""
    if seen is None or not seen.total_ms:
        return []
    known = (
        ("queue", "Queue", seen.queue_ms),
        ("prefill", "Prefill", max(seen.prefill_ms, seen.ttft_ms - seen.queue_ms - seen.transfer_ms)),
        ("transfer", "KV transfer", seen.transfer_ms),
    )
    spent_ms = sum(took_ms for _, _, took_ms in known)
    total_ms = max(seen.total_ms, spent_ms)
    found, at_ms = [], 0.0
    for name, words, took_ms in (*known, ("decode", "Decode", total_ms - spent_ms)):
        if took_ms > 0:
            share = took_ms / total_ms
            found.append(Stage(name=name, words=words, from_ms=at_ms, took_ms=took_ms, share=share))
        at_ms += took_ms
    return found


def request_view_routes(desk: Desk, texts: TextDesk) -> list[HTTPRouteHandler]:
    """Return the handlers of the request log."""

    @get("/portal/requests")
    async def list_requests(request: Request[Any, Any, Any]) -> Response[str]:
        """Show the organisation's requests, newest first, a page at a time."""
        visit = await desk.enter(request, Right.USAGE)
        asked = request.query_params
        chosen = range_of(asked.get("range"), desk.now_s())
        query = {"range": chosen.name} | {name: asked[name] for name in _FILTERS if asked.get(name)}
        wanted = queries.RequestFilter(
            since_ms=chosen.span.start_s * 1000,
            before=_before(asked.get("before", "")),
            project=query.get("project", ""),
            key_id=query.get("key", ""),
            model=query.get("model", ""),
            path=query.get("path", ""),
            outcome=query.get("outcome", ""),
            missed=query.get("targets") == "missed",
        )
        names = await desk.names(visit.tenant)
        async with desk.reading(visit) as db:
            rows = await queries.search_requests(db, visit.tenant, wanted, limit=PAGE + 1)
        last = rows[PAGE - 1] if len(rows) > PAGE else None
        return desk.show(
            request,
            "requests",
            visit,
            range=chosen,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            query=query,
            filters=_choices(names, desk),
            recent=rows[:PAGE],
            older=f"{last.at_ms}.{last.request_id}" if last else "",
            meters=meters_of,
            model=desk.any_model(),
        )

    @get("/portal/requests/find")
    async def find_request(request: Request[Any, Any, Any]) -> Response[str]:
        """Go to the page of a request by its id, or the id of its answer."""
        visit = await desk.enter(request, Right.USAGE)
        found = await desk.lookup.find(visit.tenant, request.query_params.get("id", "").strip())
        return desk.pages.go(request, f"/portal/requests/{found.id}")

    @get("/portal/requests/{rid:str}")
    async def get_request(request: Request[Any, Any, Any], rid: FromPath[str]) -> Response[str]:
        """Show one request of this organisation. Raises NotFound."""
        visit = await desk.enter(request, Right.USAGE)
        found = await desk.lookup.find(visit.tenant, rid)
        model = desk.catalog.models.get(found.model)
        return desk.show(
            request,
            "request",
            visit,
            found=found,
            stages=stages_of(found.timings),
            target=model.tiers.get(found.tier) if model else None,
            names=await desk.names(visit.tenant),
            link=False,
            talk=await talk_of(texts, visit, found.id),
            readable=readable,
        )

    @get("/portal/requests/{rid:str}/receipt")
    async def get_receipt(request: Request[Any, Any, Any], rid: FromPath[str]) -> Response[str]:
        """Return what a request cost, line by line, as a part of a page; `x-settled: 1` once that is final."""
        visit = await desk.enter(request, Right.COSTS)
        found = await desk.lookup.find(visit.tenant, rid)
        response = desk.show(request, "receipt", visit, found=found, link=True)
        response.headers["x-settled"] = "1" if _settled(found) else "0"
        return response

    return [list_requests, find_request, get_request, get_receipt]


_FILTERS: Final = ("project", "key", "model", "path", "outcome", "targets")


def _choices(names: Names, desk: Desk) -> Mapping[str, Sequence[tuple[str, str]]]:
    return {
        "project": list(names.projects.items()),
        "key": list(names.keys.items()),
        "model": [(name, name) for name in desk.catalog.models],
        "path": list(PATHS.items()),
        "outcome": list(_OUTCOMES.items()),
        "targets": [("missed", "Missed")],
    }


def _before(text: str) -> tuple[int, str] | None:
    if not text:
        return None
    at_ms, _, rid = text.partition(".")
    if not at_ms.isdecimal() or len(at_ms) > 14 or len(rid) != 36:
        raise BadRequest("This link to older requests is broken.", param="before")
    return int(at_ms), rid


def _settled(found: RequestView) -> bool:
    return found.status not in ("running", "queued")
