"""What operators do on `/portal/fleet`: one worker's drain and role, who decides about the ratio, pauses of models.

Forms of the session with its secret, like all others; each is in the record of changes, by the same code as the admin
API. What a worker answers may take a minute, so the page shows how the order stands whenever it is loaded.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlencode

import msgspec
from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import BadRequest, ServingError
from contracts.lifecycle import Role
from contracts.steering import Steering
from gateway.admin.fleet_routes import FleetDesk, check_split
from gateway.admin.organisations import Organisations
from gateway.admin.shapes import OrderView, SteeringChange
from gateway.admin.worker_orders import WorkerOrders
from gateway.holds import SUSPENDED, Hold
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk

MODES: Final = (
    ("auto", "Auto: the controller decides and moves"),
    ("shadow", "Shadow: it decides, nothing moves"),
    ("manual", "Manual: keep the split below"),
    ("settings", "As the scheduler's settings say"),
)
ORDERS: Final[Mapping[str, tuple[Literal["role", "drain", "undrain"], Role | None]]] = {
    "drain": ("drain", None),
    "undrain": ("undrain", None),
    **{role.value: ("role", role) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)},
}
_WAIT_S: Final = 2
_COUNTS: Final = ("prefill", "decode", "unified")


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet's page shows beside figures."""

    steering: Steering | None  # None: the scheduler's own settings
    paused: Mapping[str, bool]  # by model of the pool
    order: OrderView | None  # the one that the address names
    problem: str


class FleetControls:
    """Reads what the forms show, and carries forms out through the parts of the admin API."""

    def __init__(self, fleet: FleetDesk, orders: WorkerOrders, organisations: Organisations) -> None:
        self.fleet = fleet
        self.orders = orders
        self.organisations = organisations

    async def seen(self, pool: str, asked: Mapping[str, Any]) -> Controls:
        """Return what the page shows: who steers, which models are paused, how an order stands."""
        catalog = self.fleet.models.catalog
        held = {hold.id for hold in await self.organisations.holds.all() if hold.kind == "model"}
        order, problem = None, str(asked.get("problem", ""))[:300]
        if asked.get("order"):
            try:
                order = await self.orders.look(str(asked.get("worker", "")), str(asked["order"])[:64])
            except ServingError as error:
                problem = error.message
        return Controls(
            steering=await self.fleet.steering(pool),
            paused={name: name in held for name in catalog.models if catalog.pool_of(name) == pool},
            order=order,
            problem=problem,
        )


def control_routes(desk: Desk, controls: FleetControls) -> list[HTTPRouteHandler]:
    """Return the handlers of the fleet's forms."""

    @post("/portal/fleet/workers/{worker:str}/order", status_code=200)
    async def order_worker(request: Request[Any, Any, Any], worker: FromPath[str]) -> Response[str]:
        """Drain a worker, end its drain, or give it another role."""
        visit = await desk.enter(request, Right.FLEET)
        form = await desk.door.form(request, visit)
        if (wanted := ORDERS.get(str(form.get("what", "")))) is None:
            raise BadRequest("A worker is drained, undrained, or given a role.", param="what")
        what, role = wanted
        pool = controls.orders.find(worker).pool
        given = await controls.orders.give(worker, what, role, actor=visit.actor, wait_s=_WAIT_S)
        return desk.pages.go(request, _page(pool, worker=worker, order=given.id))

    @post("/portal/fleet/steering", status_code=200)
    async def steer(request: Request[Any, Any, Any]) -> Response[str]:
        """Set who decides about a pool's ratio, and under `manual` the split to keep."""
        visit = await desk.enter(request, Right.FLEET)
        form = await desk.door.form(request, visit)
        pool, mode = str(form.get("pool", "")), str(form.get("mode", ""))
        controls.fleet.check_pool(pool)
        if mode == "settings":
            await controls.fleet.steer(pool, None, actor=visit.actor)
            return desk.pages.go(request, _page(pool))
        counts = {name: _count(form.get(name)) for name in _COUNTS} if mode == "manual" else {}
        try:
            wanted = msgspec.convert({"mode": mode, **counts}, SteeringChange)
        except msgspec.ValidationError:
            raise BadRequest("A mode is auto, shadow or manual.", param="mode") from None
        if wanted.mode == "manual":
            check_split(controls.fleet, pool, wanted)
        await controls.fleet.steer(pool, Steering(**msgspec.structs.asdict(wanted)), actor=visit.actor)
        return desk.pages.go(request, _page(pool))

    @post("/portal/fleet/models/hold", status_code=200)
    async def hold_model(request: Request[Any, Any, Any]) -> Response[str]:
        """Pause a model on every gateway, or let it serve again; running answers may come to their end."""
        visit = await desk.enter(request, Right.FLEET)
        form = await desk.door.form(request, visit)
        name = controls.fleet.public_name(str(form.get("model", "")))
        book = controls.organisations
        if form.get("on") == "1":
            hold = Hold(kind="model", id=name, mode=SUSPENDED, drain=True, reason="paused", actor=visit.actor)
            await book.holds.put(hold, org=None)
        else:
            await book.holds.lift("model", name, org=None, actor=visit.actor)
        await book.publish()
        if form.get("page") == "models":
            return desk.pages.go(request, "/portal/fleet/models")
        return desk.pages.go(request, _page(controls.fleet.models.catalog.pool_of(name)))

    return [order_worker, steer, hold_model]


def _page(pool: str, **more: str) -> str:
    return f"/portal/fleet?{urlencode({'pool': pool, **more})}"


def _count(text: Any) -> int:
    typed = str(text or "0").strip()
    if not (typed.isascii() and typed.isdigit() and len(typed) < 5):
        raise BadRequest("A number of workers is a whole number.", param="prefill")
    return int(typed)
