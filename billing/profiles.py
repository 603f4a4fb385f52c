"""What billing must know of a tenant and of the seller beside their usage."""

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing.periods import zone
from contracts.rating import PPM


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's billing data; `tax_ppm` millionths of the subtotal, `time_zone` of its budget periods."""

    organisation: str
    legal_name: str = ""
    address: str = ""
    country: str = ""
    tax_id: str = ""
    tax_name: str = ""
    tax_ppm: int = 0
    email: str = ""
    time_zone: str = "UTC"
    prepaid: bool = False
    terms_days: int = 14
    webhook_url: str = ""
    webhook_secret: str = ""


class Seller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends the invoices."""

    legal_name: str = ""
    address: str = ""
    country: str = ""
    tax_id: str = ""
    email: str = ""


_ON_INVOICES = ("legal_name", "address", "country", "tax_id", "email")


async def find_profile(conn: AsyncConnection, tenant: str) -> Profile:
    """Return a tenant's billing data; the defaults when nothing was set."""
    row = (await conn.execute(sa.select(m.profile).where(m.profile.c.organisation == tenant))).mappings().first()
    return Profile(**row) if row else Profile(organisation=tenant)


async def set_profile(conn: AsyncConnection, profile: Profile) -> None:
    """Replace a tenant's billing data. Raises ValueError when a value makes no sense."""
    zone(profile.time_zone)
    if not 0 <= profile.tax_ppm <= PPM:
        raise ValueError(f"tax_ppm must be 0 to {PPM}; got {profile.tax_ppm}")
    if profile.webhook_url and not profile.webhook_url.startswith(("http://", "https://")):
        raise ValueError("webhook_url must start with http:// or https://")
    if profile.webhook_url and not profile.webhook_secret:
        raise ValueError("a webhook needs a secret to sign with")
    values = msgspec.structs.asdict(profile)
    query = insert(m.profile).values(values)
    await conn.execute(query.on_conflict_do_update(index_elements=["organisation"], set_=values))


async def find_seller(conn: AsyncConnection) -> Seller:
    """Return the seller; empty when nobody set it."""
    row = (await conn.execute(sa.select(m.seller))).mappings().first()
    return Seller(**{name: row[name] for name in _ON_INVOICES}) if row else Seller()


async def set_seller(conn: AsyncConnection, seller: Seller) -> None:
    """Replace the seller."""
    values = msgspec.structs.asdict(seller)
    query = insert(m.seller).values(values)
    await conn.execute(query.on_conflict_do_update(index_elements=["singleton"], set_=values))


def on_invoice(party: Profile | Seller) -> Mapping[str, Any]:
    """Return what an invoice says of a party, as it is at this moment."""
    return {name: getattr(party, name) for name in _ON_INVOICES}
