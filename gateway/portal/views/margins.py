"""Revenue less the cost of workers, by organisation, model and phase. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from billing.queries import Earned, Worked


class MarginLine(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one model for one organisation. Money in nano-units."""

    organisation: str
    model: str
    phase: str
    tokens: int
    revenue: int
    busy_s: float
    retried_s: float
    cost: int

    @property
    def margin(self) -> int:
        """Revenue less cost; retries are part of the cost."""
        return self.revenue - self.cost

    @property
    def share(self) -> float | None:
        """Margin over revenue; None without revenue."""
        return self.margin / self.revenue if self.revenue else None


def margin_lines(
    earned: Sequence[Earned], worked: Sequence[Worked], names: Mapping[str, str], *, nano_per_hour: int
) -> Sequence[MarginLine]:
    """Return a line for each group that earned or worked, the largest revenue first."""
    revenue = {(one.organisation, one.model, one.phase): one for one in earned}
    work = {(one.organisation, one.model, one.phase): one for one in worked}
    lines = []
    for key in revenue.keys() | work.keys():
        paid, done = revenue.get(key), work.get(key)
        busy_s = done.busy_s if done else 0.0
        lines.append(
            MarginLine(
                organisation=names.get(key[0], key[0]),
                model=key[1],
                phase=key[2],
                tokens=paid.tokens if paid else 0,
                revenue=paid.revenue if paid else 0,
                busy_s=busy_s,
                retried_s=done.retried_s if done else 0.0,
                cost=round(busy_s * nano_per_hour / 3600),
            )
        )
    return sorted(lines, key=lambda one: (-one.revenue, one.organisation, one.model, one.phase))
