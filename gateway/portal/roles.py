"""What a role may do. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Role(StrEnum):
    """What somebody is in an organisation. `OPERATOR` runs the fleet; it may do all but read what tenants said."""

    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    BILLING = "billing"
    VIEWER = "viewer"
    OPERATOR = "operator"


class Right(StrEnum):
    """One thing that somebody may do."""

    READ = "read"  # projects, limits, models, status
    USAGE = "usage"  # tokens, requests and their timelines
    COSTS = "costs"  # money: spend, invoices, credits, budgets
    PLAY = "play"  # the playground
    KEYS = "keys"  # make, rotate and revoke keys
    PROJECTS = "projects"  # make projects, set limits and scopes
    MONEY = "money"  # set budgets, the billing profile and its webhook
    MEMBERS = "members"  # invite, change roles, remove; service accounts
    AUDIT = "audit"  # read the record of changes
    TEXTS = "texts"  # read stored prompts and answers
    STORAGE = "storage"  # decide whether prompts and answers are stored, and delete them
    OWNERS = "owners"  # make and unmake owners
    FLEET = "fleet"  # operate: workers, models, prices, all tenants


MEMBER_ROLES: Final = (Role.OWNER, Role.ADMIN, Role.DEVELOPER, Role.BILLING, Role.VIEWER)

_SEES: Final = frozenset({Right.READ, Right.USAGE})
_ADMIN: Final = frozenset(Right) - {Right.OWNERS, Right.FLEET}

RIGHTS: Final[Mapping[Role, frozenset[Right]]] = MappingProxyType(
    {
        Role.OWNER: _ADMIN | {Right.OWNERS},
        Role.ADMIN: _ADMIN,
        Role.DEVELOPER: _SEES | {Right.COSTS, Right.PLAY, Right.KEYS, Right.TEXTS},
        Role.BILLING: _SEES | {Right.COSTS, Right.MONEY},
        Role.VIEWER: _SEES,
        # What tenants said is theirs: who runs the fleet reads it as a member of theirs, or not at all.
        Role.OPERATOR: frozenset(Right) - {Right.TEXTS, Right.STORAGE},
    }
)


def may(role: Role, right: Right) -> bool:
    """Return whether a role has a right."""
    return right in RIGHTS[role]


def may_give(giver: Role, role: Role) -> bool:
    """Return whether somebody may make another one a `role`, or take it away: only owners make owners."""
    if role is Role.OPERATOR:
        return giver is Role.OPERATOR
    return may(giver, Right.OWNERS if role is Role.OWNER else Right.MEMBERS)
