"""Organisations, projects and models that are suspended or may only read: what every gateway knows in memory.

`suspended` refuses everything; `read_only` refuses what would run on a worker. Both are reversible. Postgres is
the record (gateway.changes writes it); the stream of changes makes every gateway know within the second.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from contracts.errors import NoCapacity, PermissionDenied, ServingError

SUSPENDED: Final = "suspended"
READ_ONLY: Final = "read_only"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is held. `kind` is org, project or model."""

    kind: str
    id: str
    mode: str  # suspended | read_only
    drain: bool = False  # running streams may end by themselves
    reason: str = ""
    actor: str = ""


class Suspended(PermissionDenied):
    """The caller's organisation or project is suspended, or may only read."""

    code = "suspended"


class Holds:
    """What is held. Read at every request."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Hold] = {}

    def replace(self, holds: Iterable[Hold]) -> list[Hold]:
        """Take the whole record; return the holds that were not known."""
        held = {(hold.kind, hold.id): hold for hold in holds}
        new = [hold for key, hold in held.items() if self._held.get(key) != hold]
        self._held = held
        return new

    def set(self, hold: Hold) -> None:
        """Take one hold."""
        self._held[hold.kind, hold.id] = hold

    def lift(self, kind: str, name: str) -> None:
        """Forget a hold."""
        self._held.pop((kind, name), None)

    def check_caller(self, org: str, project: str, *, serving: bool) -> None:
        """Raise Suspended when a tenant may not call; `serving`: the call would run on a worker."""
        if not self._held:
            return
        for kind, name, what in (("org", org, "organisation"), ("project", project, "project")):
            hold = self._held.get((kind, name))
            if hold is not None and (serving or hold.mode == SUSPENDED):
                raise _refusal(hold, what)

    def check_model(self, model: str) -> None:
        """Raise NoCapacity when a model is held."""
        if self._held and ("model", model) in self._held:
            raise NoCapacity(f"The model '{model}' is suspended by the operator.", retry_after_s=60)


def _refusal(hold: Hold, what: str) -> ServingError:
    if hold.mode == READ_ONLY:
        return Suspended(f"This {what} may only read at the moment.")
    return Suspended(f"This {what} is suspended.")
