"""The price book: its versions, new ones, and what one would change. Reads go to PostgreSQL, the rest to billing."""

import datetime as dt

from litestar import get, post
from litestar.handlers import HTTPRouteHandler

from billing import queries
from contracts.v1 import billing_pb2 as pb
from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest, nano_of, taken, unix_ms
from gateway.admin.money import Noted
from gateway.admin.money_routes import TAGS, thing
from gateway.admin.paging import ListOf, page
from gateway.admin.shapes import NewPrice, PriceChangeView, PricePreviewView, PriceTerms, ProposedPrice, Thing
from gateway.openapi import json_operation
from gateway.schemas.answers import money_text


def price_routes(callers: Callers, noted: Noted) -> list[HTTPRouteHandler]:
    """Return the handlers of prices."""

    @get("/admin/v1/prices", summary="List prices", operation_id="listPrices", tags=TAGS)
    async def list_prices(request: AnyRequest) -> ListOf[Thing]:
        """Return every version of every price, overrides included; filter by `model`."""
        await callers.operator(request)
        async with noted.engine.begin() as db:
            found = await queries.list_prices(db, request.query_params.get("model"))
        views = [thing("price", one) for one in found]
        return page(request, views, lambda view: f"{view.value['price']['model']}:{view.value['price']['version']}")

    @post(
        "/admin/v1/prices",
        summary="Set a price",
        operation_id="createPrice",
        tags=TAGS,
        operation_class=json_operation(NewPrice, Thing, status=201),
    )
    async def create_price(request: AnyRequest) -> Thing:
        """Add a version to the price book; what was used before keeps its price."""
        caller = await callers.operator(request)
        wanted = await taken(request, NewPrice)
        asked = _version(wanted)
        asked.from_ms, asked.to_ms = unix_ms(wanted.from_at, "from_at"), unix_ms(wanted.to_at, "to_at")
        asked.by = caller.actor
        org = wanted.organisation or None
        made = await noted.call("SetPrice", asked, actor=caller.actor, subject=wanted.model, org=org, kind="price")
        return Thing(object="price", value={"model": wanted.model, "version": made.version, "from_ms": made.from_ms})

    @post(
        "/admin/v1/prices/preview",
        summary="Preview a price",
        operation_id="previewPrice",
        tags=TAGS,
        status_code=200,
        operation_class=json_operation(ProposedPrice, PricePreviewView),
    )
    async def preview_price(request: AnyRequest) -> PricePreviewView:
        """Play a price on past usage: old and new cost of each organisation and meter. Nothing is written."""
        await callers.operator(request)
        wanted = await taken(request, ProposedPrice)
        used_from, used_to = unix_ms(wanted.used_from, "used_from"), unix_ms(wanted.used_to, "used_to")
        asked = pb.PriceProposal(price=_version(wanted), from_ms=used_from, to_ms=used_to)
        return _preview_view(await noted.preview(asked))

    return [list_prices, create_price, preview_price]


def _version(wanted: PriceTerms) -> pb.PriceVersion:
    return pb.PriceVersion(
        model=wanted.model,
        organisation=wanted.organisation,
        tier=wanted.tier,
        prefill_computed=nano_of(wanted.prefill_computed),
        prefill_cached=nano_of(wanted.prefill_cached),
        decode=nano_of(wanted.decode),
        prefill_shared=None if wanted.prefill_shared is None else nano_of(wanted.prefill_shared),
        batch_ppm=wanted.batch_ppm,
        minimum=nano_of(wanted.minimum),
    )


def _preview_view(found: pb.PricePreview) -> PricePreviewView:
    changes = [
        PriceChangeView(
            organisation_id=one.organisation,
            meter=one.meter,
            requests=one.requests,
            old=money_text(one.old_cost),
            new=money_text(one.new_cost),
            difference=money_text(one.new_cost - one.old_cost),
            old_nano=one.old_cost,
            new_nano=one.new_cost,
            difference_nano=one.new_cost - one.old_cost,
        )
        for one in found.changes
    ]
    whole = sum(one.difference_nano for one in changes)
    return PricePreviewView(
        used_from=_moment(found.from_ms),
        used_to=_moment(found.to_ms),
        difference=money_text(whole),
        difference_nano=whole,
        changes=changes,
    )


def _moment(unix_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(unix_ms / 1000, dt.UTC)
