"""Sums over buckets. Pure."""

from collections.abc import Sequence

import msgspec

from billing.queries import Explored, Health, Period


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """What an organisation used in a period and how its requests went. Cost in nano-units."""

    cost: int
    computed: int
    cached: int
    decode: int
    requests: int  # all that came to an end, billed or not
    failed: int
    met: int
    missed: int

    @property
    def tokens(self) -> int:
        """All tokens, prompt and answer."""
        return self.computed + self.cached + self.decode

    @property
    def judged(self) -> int:
        """Requests with targets."""
        return self.met + self.missed

    @property
    def attainment(self) -> float | None:
        """Share (0 to 1) of the requests with targets that met them."""
        return self.met / self.judged if self.judged else None

    @property
    def errors(self) -> float | None:
        """Share (0 to 1) of requests that failed."""
        return self.failed / self.requests if self.requests else None

    @property
    def cached_share(self) -> float | None:
        """Share (0 to 1) of prompt tokens that were found in the cache."""
        prompt = self.computed + self.cached
        return self.cached / prompt if prompt else None


def total_of(used: Sequence[Explored], went: Sequence[Health]) -> Total:
    """Return the sum of all buckets."""
    return Total(
        cost=sum(one.cost for one in used),
        computed=sum(one.computed for one in used),
        cached=sum(one.cached for one in used),
        decode=sum(one.decode for one in used),
        requests=sum(one.requests for one in went),
        failed=sum(one.failed for one in went),
        met=sum(one.met for one in went),
        missed=sum(one.missed for one in went),
    )


def total_of_period(seen: Period) -> Total:
    """Return the sums of a whole time as they are compared."""
    return Total(**msgspec.structs.asdict(seen))
