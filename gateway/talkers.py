"""How unequally tenants use one gateway: shares by rank, since names may not be labels."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

HALF_LIFE_S: Final = 120.0
MAX_TENANTS: Final = 10_000
_LARGE: Final = 10
_NEGLIGIBLE: Final = 0.01  # tokens: as good as none


class TopTalkers:
    """Tokens of each organisation, forgotten by half every two minutes."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}  # as of the epoch, so that nothing has to be aged one by one
        self._epoch_s = 0.0

    def add(self, org: str, tokens: int, *, now_s: float) -> None:
        """Count tokens of an organisation. Beyond the bound of tenants, new ones are not told apart."""
        if now_s - self._epoch_s > 20 * HALF_LIFE_S:
            self._restart(now_s)
        known = org if org in self._tokens or len(self._tokens) < MAX_TENANTS else ""
        self._tokens[known] = self._tokens.get(known, 0.0) + tokens * math.exp2((now_s - self._epoch_s) / HALF_LIFE_S)

    def shares(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        """Return the share of ranks 1, 2-10 and rest; nothing without traffic."""
        ordered = sorted(self._tokens.values(), reverse=True)
        total = sum(ordered)
        if not total:
            return []
        ranks = {"1": ordered[:1], "2-10": ordered[1:_LARGE], "rest": ordered[_LARGE:]}
        return [(sum(tokens) / total, {"rank": rank}) for rank, tokens in ranks.items()]

    def _restart(self, now_s: float) -> None:
        faded = math.exp2((self._epoch_s - now_s) / HALF_LIFE_S)
        self._tokens = {org: left for org, tokens in self._tokens.items() if (left := tokens * faded) > _NEGLIGIBLE}
        self._epoch_s = now_s
