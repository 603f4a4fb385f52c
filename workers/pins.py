"""Which prompts in a cache are worth more than others: those that a tenant had computed ahead.

A cache evicts what is worth least, among equals what was used longest ago. So a warmed prompt goes after everything
that was not warmed. What is held that way is bounded to `SHARE` of the cache, or a few tenants could keep it from
all others: beyond that a warmed prompt is worth as much as any.
"""

import hashlib
from typing import Final

from workers.engine import Job

SHARE: Final = 0.5
ORDINARY: Final = 0
WARMED: Final = 10
"""Above what engines give by themselves: SGLang gives an answer 0 and its prompt 1."""


class Pins:
    """The warmed prompts of one engine."""

    def __init__(self, kv_capacity_tokens: int) -> None:
        self._room_tokens = int(SHARE * kv_capacity_tokens)
        self._held: dict[bytes, int] = {}  # digest -> tokens
        self._tokens = 0

    def value_of(self, job: Job) -> int:
        """Return what a job's prompt is worth in the cache, and count it. The same one counts once."""
        if not job.prompt_only:
            return ORDINARY
        name = hashlib.blake2b(b"\0".join((job.cache_salt.encode(), job.adapter.encode(), job.prompt))).digest()
        if name not in self._held:
            if self._tokens + job.num_prompt_tokens > self._room_tokens:
                return ORDINARY
            self._held[name] = job.num_prompt_tokens
            self._tokens += job.num_prompt_tokens
        return WARMED

    def clear(self) -> None:
        """Forget all of it: the cache is empty."""
        self._held.clear()
        self._tokens = 0
