"""Revenue less the cost of workers, by organisation, model and phase. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from billing.queries import Earned, Worked

NOBODY: Final = "Nobody"


class MarginLine(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one model for one organisation. Money in nano-units."""

    organisation: str
    model: str
    phase: str
    tokens: int
    revenue: int
    busy_s: float
    retried_s: float
    idle_s: float  # its share of what its pool's workers waited
    cost: int

    @property
    def margin(self) -> int:
        """Revenue less cost; retries and idleness are part of the cost."""
        return self.revenue - self.cost

    @property
    def share(self) -> float | None:
        """Margin over revenue; None without revenue."""
        return self.margin / self.revenue if self.revenue else None


def margin_lines(
    earned: Sequence[Earned],
    worked: Sequence[Worked],
    names: Mapping[str, str],
    *,
    nano_per_hour: int,
    ready_s: Mapping[str, float],
    pool_of: Callable[[str], str],
) -> Sequence[MarginLine]:
    """Return a line for each group that earned or worked, the largest revenue first.

    Args:
        earned: revenue by organisation, model and phase.
        worked: the workers' seconds by the same.
        names: of organisations.
        nano_per_hour: what an hour of a worker costs.
        ready_s: by pool, how long its workers were ready; empty = not known, and nothing is counted as idle.
        pool_of: the pool of a model.

    What a pool's workers waited is shared by those who used it, by how much they did; of a pool that nobody used it is
    a line of nobody's.
    """
    revenue = {(one.organisation, one.model, one.phase): one for one in earned}
    work = {(one.organisation, one.model, one.phase): one for one in worked}
    busy: dict[str, float] = {}
    for one in worked:
        busy[pool_of(one.model)] = busy.get(pool_of(one.model), 0.0) + one.busy_s
    idle = {pool: max(0.0, ready - busy.get(pool, 0.0)) for pool, ready in ready_s.items()}

    def line(key: tuple[str, str, str]) -> MarginLine:
        paid, done = revenue.get(key), work.get(key)
        busy_s = done.busy_s if done else 0.0
        pool = pool_of(key[1])
        idle_s = idle.get(pool, 0.0) * busy_s / busy[pool] if busy_s else 0.0
        return MarginLine(
            organisation=names.get(key[0], key[0]),
            model=key[1],
            phase=key[2],
            tokens=paid.tokens if paid else 0,
            revenue=paid.revenue if paid else 0,
            busy_s=busy_s,
            retried_s=done.retried_s if done else 0.0,
            idle_s=idle_s,
            cost=round((busy_s + idle_s) * nano_per_hour / 3600),
        )

    lines = [line(key) for key in revenue.keys() | work.keys()]
    lines += [
        MarginLine(
            organisation=NOBODY, model=pool, phase="idle", tokens=0, revenue=0, busy_s=0.0, retried_s=0.0,
            idle_s=idle_s, cost=round(idle_s * nano_per_hour / 3600),
        )
        for pool, idle_s in idle.items()
        if idle_s and not busy.get(pool)
    ]  # fmt: skip
    return sorted(lines, key=lambda one: (-one.revenue, one.organisation, one.model, one.phase))
