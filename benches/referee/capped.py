"""A planner of replicas held to as many workers as everybody else has. Pure.

The planner says how many replicas of each kind it wants. Fewer are had at once; more only as workers are free, and one
that drains is not free until it has gone. What could not be granted is granted later, unless the planner has said
something else by then. It is asked at its own times.
"""

from collections.abc import Mapping
from typing import Any, Protocol

ROLES = ("prefill", "decode")


class Planner(Protocol):
    """A scaling policy of the mocker."""

    def initial_tick_ms(self) -> float:
        """Return when the first tick is."""

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Take a snapshot, return wanted counts and the time of the next tick."""


class Capped:
    """Stands between the mocker and a planner."""

    def __init__(self, planner: Planner, workers: int) -> None:
        self._planner = planner
        self._workers = workers
        self._wanted: dict[str, int] = {}
        self.num_wished = 0
        """Changes of a count that the planner asked for."""
        self.num_moved = 0
        """Workers that were started or stopped for it."""
        self.most_workers = 0
        """Seen at once, those that drain or start included."""

    def initial_tick_ms(self) -> float:
        """Return when the planner first wants to be asked."""
        return self._planner.initial_tick_ms()

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Ask the planner, grant what there is room for."""
        decision = self._planner.on_tick(snapshot)
        now = {role: snapshot[f"active_{role}_count"] + snapshot[f"starting_{role}_count"] for role in ROLES}
        draining = sum(snapshot[f"draining_{role}_count"] for role in ROLES)
        self.most_workers = max(self.most_workers, sum(now.values()) + draining)
        for role in ROLES:
            target = decision[f"target_{role}"]
            if target is not None:
                self.num_wished += target != self._wanted.get(role, now[role])
                self._wanted[role] = target
        granted = self.granted(now, draining)
        self.num_moved += sum(abs(granted[role] - now[role]) for role in ROLES)
        self._wanted = {role: count for role, count in self._wanted.items() if granted[role] != count}
        targets = {f"target_{role}": granted[role] if granted[role] != now[role] else None for role in ROLES}
        return {**targets, "next_tick_ms": decision["next_tick_ms"]}

    def granted(self, now: Mapping[str, int], draining: int) -> dict[str, int]:
        """Return how many of each kind may be there: what stops now is not free before it has drained."""
        free = max(0, self._workers - sum(now.values()) - draining)
        granted = {}
        for role in ROLES:
            more = self._wanted.get(role, now[role]) - now[role]
            given = min(more, free)
            free -= max(0, given)
            granted[role] = now[role] + given
        return granted
