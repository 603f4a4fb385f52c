"""What `pdgate doctor` finds."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import sqlalchemy.exc
from redis.exceptions import RedisError

from contracts.catalog import CatalogError
from pdgate.preflight import CannotStart
from pdgate.services import ServiceError

FAULTS = (CannotStart, ServiceError, CatalogError)
LOST = (RedisError, sqlalchemy.exc.SQLAlchemyError, OSError, TimeoutError)
"""What a server that does not answer raises."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `ok` False = something is to be changed, and `change` says what."""

    check: str
    ok: bool
    found: str
    change: str = ""


def attempt(name: str, find: Callable[[], str], change: str = "") -> Check:
    """Return what `find` returns, or the fault that it raises."""
    try:
        return Check(check=name, ok=True, found=find())
    except FAULTS as error:
        return Check(check=name, ok=False, found=str(error), change=change)


def judged(name: str, found: str, wrong: Iterable[tuple[bool, str]]) -> Check:
    """Return a check that is ok unless one of the conditions holds; its advice says what to change."""
    changes: Sequence[str] = [change for holds, change in wrong if holds]
    return Check(check=name, ok=not changes, found=found, change="; ".join(changes))
