"""What is let in while Redis does not answer: a few requests per key and process, charged when it is back."""

from collections import Counter


class Outage:
    """Counts what was let in since Redis last answered. Nobody's limits are checked, so the counts are small."""

    def __init__(self, *, per_key: int, per_process: int) -> None:
        self._per_key = per_key
        self._per_process = per_process
        self._let_in: Counter[str] = Counter()

    def let_in(self, key_id: str) -> bool:
        """Count a request of a key; False when it is one too many."""
        if self._let_in[key_id] >= self._per_key or self._let_in.total() >= self._per_process:
            return False
        self._let_in[key_id] += 1
        return True

    def over(self) -> None:
        """Begin anew: Redis answered."""
        if self._let_in:
            self._let_in.clear()
