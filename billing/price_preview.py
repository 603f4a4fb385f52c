"""A price that is not in the book, played on usage of the past: who would have paid how much more. Writes nothing.

The query is the one that re-rates (billing.rerating), so setting the price and re-rating the period changes exactly
what the preview said, if nothing came in between: corrections, earlier re-ratings, discounts, the minimum and narrower
prices count as they do there. Usage is read a UTC day at a time, as it is partitioned: a month of any size takes the
memory and the longest statement of its largest day.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import tables as t
from billing.prices import PriceError
from billing.rerating import RATED_AGAIN, Change, numbers_of
from contracts.rating import Price

_SUMS: Final = sa.text(f"""{RATED_AGAIN}
SELECT organisation, meter, count(*) FILTER (WHERE old_cost <> new_cost) AS requests,
    sum(old_cost)::bigint AS old_cost, sum(new_cost)::bigint AS new_cost
FROM every GROUP BY organisation, meter HAVING sum(old_cost) <> 0 OR sum(new_cost) <> 0
""")  # noqa: S608 - constants of this package
_DAY: Final = timedelta(days=1)
_LONGEST: Final = timedelta(days=400)


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A price and the usage to play it on. `organisation`: whose own price it would be, None = the list's."""

    price: Price
    organisation: str | None
    from_at: datetime
    to_at: datetime


async def preview_price(conn: AsyncConnection, proposed: Proposal) -> Sequence[Change]:
    """Return old and new cost by organisation and meter; also of those whose narrower price would stay.

    Raises:
        PriceError: no such model in the book, no period, or a very long one.
    """
    if proposed.from_at >= proposed.to_at:
        raise PriceError(f"the period must end ({proposed.to_at}) after it starts ({proposed.from_at})")
    if proposed.to_at - proposed.from_at > _LONGEST:
        raise PriceError(
            f"a preview covers at most {_LONGEST.days} days; this would be {proposed.from_at} to {proposed.to_at}"
        )
    known = sa.select(t.price.c.version).where(t.price.c.model == proposed.price.model).limit(1)
    if (await conn.execute(known)).first() is None:
        raise PriceError(f"{proposed.price.model} has no price: see `pdgate prices list`")
    parameters = {
        "model": proposed.price.model,
        "organisation": proposed.organisation,
        "payer": proposed.organisation,
        "forced": False,
        **numbers_of(proposed.price),
    }
    total: dict[tuple[str, str], Change] = {}
    for from_at, to_at in _days(proposed.from_at, proposed.to_at):
        rows = await conn.execute(_SUMS, {**parameters, "from_at": from_at, "to_at": to_at})
        for row in rows.mappings():
            found = Change(**{name: row[name] for name in Change.__struct_fields__})
            key = (found.organisation, found.meter)
            total[key] = _sum(total[key], found) if key in total else found
    return [total[key] for key in sorted(total)]


def _days(from_at: datetime, to_at: datetime) -> Iterator[tuple[datetime, datetime]]:
    while from_at < to_at:
        midnight = datetime.combine(from_at.astimezone(UTC).date() + _DAY, time(), UTC)
        yield from_at, min(midnight, to_at)
        from_at = midnight


def _sum(one: Change, other: Change) -> Change:
    return Change(
        organisation=one.organisation,
        meter=one.meter,
        requests=one.requests + other.requests,
        old_cost=one.old_cost + other.old_cost,
        new_cost=one.new_cost + other.new_cost,
    )
