"""How long an attempt may be silent: until its first token, and between two.

A silent worker is a slow one or one that this gateway cannot hear. So its link is doubted at each look, and an attempt
without a token on a worker out of reach is given up at once: the scheduler, which may well reach it, cannot know.

The total is the generation's own timer, and connections have theirs (gateway.attach). The clock of an attempt starts
when it is placed, so waiting in the queue is not counted. The last attempt gets the whole deadline: giving it up
would gain nothing.
"""

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from contracts.wire import Placed

MAX_ATTEMPTS: Final = 3
"""As many as the scheduler makes of one request."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in seconds."""

    first_token_s: float = 60.0
    first_token_s_per_1000: float = 20.0  # of prompt tokens; those in a cache are not known before the end
    between_tokens_s: float = 60.0

    def allowed_s(self, *, prompt_tokens: int, any_token: bool) -> float:
        """Return how long an attempt may be silent."""
        if any_token:
            return self.between_tokens_s
        return self.first_token_s + self.first_token_s_per_1000 * prompt_tokens / 1000


class Links(Protocol):
    """What is known of the ways to workers."""

    def reachable(self, worker_id: str) -> bool:
        """Return whether the token stream of a worker stands, or may soon stand again."""
        ...

    def doubt(self, worker_id: str) -> None:
        """Have the link to a worker show that it still carries anything."""
        ...


def out_of_reach(placed: Placed | None, attempt: int, links: Links) -> tuple[str, ...]:
    """Return the worker of an attempt's tokens if this gateway cannot hear it."""
    if placed is None or placed.attempt != attempt or links.reachable(placed.decode.worker_id):
        return ()
    return (placed.decode.worker_id,)


class Silence:
    """How long one request's current attempt has been silent. Looked at about once a second."""

    __slots__ = ("_attempt", "_num_tokens", "_since_s", "_unreached")

    def __init__(self) -> None:
        self._attempt = self._num_tokens = -1
        self._unreached = -1  # the attempt that was given up for its worker's link
        self._since_s = 0.0

    def look(
        self,
        now_s: float,
        patience: Patience,
        *,
        attempt: int,
        num_tokens: int,
        prompt_tokens: int,
        begun: bool,
        worker_id: str,
        links: Links,
        give_up: Callable[[str], None],
    ) -> None:
        """Call `give_up` with a cause when the attempt was silent for too long, or nobody can hear it.

        `begun`: a token of this attempt has come. `worker_id` is where its tokens come from.
        """
        if not begun and attempt < MAX_ATTEMPTS and attempt != self._unreached and not links.reachable(worker_id):
            self._unreached = attempt
            give_up("unreachable")
            return
        if not begun or num_tokens == self._num_tokens:
            links.doubt(worker_id)
        if (attempt, num_tokens) != (self._attempt, self._num_tokens):
            self._attempt, self._num_tokens, self._since_s = attempt, num_tokens, now_s
            return
        if attempt >= MAX_ATTEMPTS:
            return
        if now_s - self._since_s > patience.allowed_s(prompt_tokens=prompt_tokens, any_token=num_tokens > 0):
            self._since_s = now_s  # the next attempt resets it; until then this one is not given up twice
            give_up("no_next_token" if num_tokens else "no_first_token")
