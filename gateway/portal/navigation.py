"""The menu: which pages there are, for whom. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.portal.door import Visit
from gateway.portal.roles import Right


class Place(msgspec.Struct, frozen=True):
    """One entry of the menu."""

    words: str
    path: str
    right: Right


MENU: Final[Sequence[tuple[str, Sequence[Place]]]] = (
    ("", (
        Place("Overview", "/portal", Right.READ),
        Place("Playground", "/portal/playground", Right.PLAY),
        Place("Usage", "/portal/usage", Right.USAGE),
        Place("Requests", "/portal/requests", Right.USAGE),
        Place("Status", "/portal/status", Right.READ),
    )),
    ("Access", (
        Place("Projects and keys", "/portal/keys", Right.READ),
        Place("Limits", "/portal/limits", Right.READ),
        Place("Members", "/portal/members", Right.READ),
        Place("Stored texts", "/portal/texts", Right.READ),
        Place("Audit log", "/portal/audit", Right.AUDIT),
    )),
    ("Money", (
        Place("Budgets", "/portal/budgets", Right.COSTS),
        Place("Invoices", "/portal/invoices", Right.COSTS),
        Place("Credits", "/portal/credits", Right.COSTS),
        Place("Webhooks", "/portal/webhooks", Right.COSTS),
    )),
    ("Fleet", (
        Place("Workers", "/portal/fleet", Right.FLEET),
        Place("Models", "/portal/fleet/models", Right.FLEET),
        Place("Targets", "/portal/fleet/targets", Right.FLEET),
        Place("Tenants", "/portal/fleet/tenants", Right.FLEET),
        Place("Prices", "/portal/fleet/prices", Right.FLEET),
        Place("Margin", "/portal/fleet/margin", Right.FLEET),
    )),
)  # fmt: skip


def menu_of(visit: Visit) -> Sequence[tuple[str, Sequence[Place]]]:
    """Return the sections that somebody may see, with their entries."""
    allowed = [(title, [one for one in entries if visit.may(one.right)]) for title, entries in MENU]
    return [(title, entries) for title, entries in allowed if entries]
