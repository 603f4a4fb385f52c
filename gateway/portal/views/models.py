"""`/portal/fleet/models`: which models there are; for operators to add, pause and remove them.

What stands in the way of one is said where the form is, with what was typed still in it: the same checks and words as
`POST` and `DELETE /admin/v1/models`.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import ServingError
from gateway.admin.model_routes import ModelDesk
from gateway.new_models import NewModel
from gateway.portal.door import AnyRequest, Visit
from gateway.portal.roles import Right
from gateway.portal.views.controls import FleetControls
from gateway.portal.views.desk import Desk
from gateway.schemas.decoding import bad_field

PATH: Final = "/portal/fleet/models"
_TEXTS: Final = ("name", "folder", "profile", "hand_off", "tool_parser", "reasoning_parser")
_NUMBERS: Final = (
    *("prefill", "decode", "unified", "context_tokens", "default_max_tokens", "worker_memory_gb", "ttft_ms", "tpot_ms"),
)
_PRICES: Final = ("prefill_computed", "prefill_cached", "decode_price")
_MOST_CHARACTERS: Final = 2000


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What stood in the way of an act, and which field it is about."""

    words: str
    field: str = ""
    status: int = 400


def model_view_routes(desk: Desk, models: ModelDesk, controls: FleetControls) -> list[HTTPRouteHandler]:
    """Return the handlers of models."""

    async def page(
        request: AnyRequest, visit: Visit, *, typed: Mapping[str, str] | None = None, problem: Problem | None = None
    ) -> Response[str]:
        return desk.show(
            request,
            "models",
            visit,
            models=[one.value for one in await models.views()],
            prices=models.desk.models.list_prices,
            typed=typed or {},
            problem=problem,
            status=problem.status if problem else 200,
        )

    @get(PATH)
    async def list_models(request: Request[Any, Any, Any]) -> Response[str]:
        """Show every model, and the form for another one."""
        return await page(request, await desk.enter(request, Right.FLEET))

    @post(PATH, status_code=200)
    async def add_model(request: Request[Any, Any, Any]) -> Response[str]:
        """Add a model, or say why not."""
        visit = await desk.enter(request, Right.FLEET)
        form = await desk.door.form(request, visit)
        names = (*_TEXTS, *_NUMBERS, *_PRICES, "aliases")
        typed = {name: str(form.get(name, "")).strip()[:_MOST_CHARACTERS] for name in names}
        try:
            await models.add(new_model(typed), actor=visit.actor)
        except ServingError as error:
            problem = Problem(words=error.message, field=_field(error.param), status=error.http_status)
            return await page(request, visit, typed=typed, problem=problem)
        return desk.pages.go(request, PATH)

    @post(f"{PATH}/{{model:str}}/remove", status_code=200)
    async def remove_model(request: Request[Any, Any, Any], model: FromPath[str]) -> Response[str]:
        """Remove a model that nobody uses, or say who does."""
        visit = await desk.enter(request, Right.FLEET)
        await desk.door.form(request, visit)
        try:
            name = models.desk.public_name(model)
            await models.remove(name, actor=visit.actor)
        except ServingError as error:
            return await page(request, visit, problem=Problem(words=error.message, status=error.http_status))
        await controls.organisations.holds.lift("model", name, org=None, actor=visit.actor)
        await controls.organisations.publish()
        return desk.pages.go(request, PATH)

    return [list_models, add_model, remove_model]


def new_model(typed: Mapping[str, str]) -> NewModel:
    """Return the model that a form describes; a field that is left empty is not said. Raises BadRequest."""
    fields: dict[str, Any] = {name: typed[name] for name in (*_TEXTS, *_NUMBERS) if typed.get(name)}
    if aliases := typed.get("aliases", "").replace(",", " ").split():
        fields["aliases"] = aliases
    price = {name.removesuffix("_price"): typed[name] for name in _PRICES if typed.get(name)}
    if price:
        fields["price"] = price
    try:
        return msgspec.convert(fields, NewModel, strict=False)
    except msgspec.ValidationError as error:
        raise bad_field(str(error)) from None


def _field(param: str | None) -> str:
    """Return the form's name of a field that an error is about."""
    name = (param or "").removeprefix("price.") if (param or "").startswith("price.") else param or ""
    return {"price": "prefill_computed"}.get(name, "decode_price" if param == "price.decode" else name)
