"""What a request sets in motion outside itself."""

from typing import Protocol

from contracts.v1 import worker_pb2 as pb
from contracts.wire import InboxEntry
from gateway.purse import Spender
from gateway.terms import Closed


class Effects(Protocol):
    """What a generation sets in motion. Implemented by the gateway's fleet; nothing here may block."""

    def abort_on_worker(self, worker_id: str, attempt: pb.AttemptId, reason: str) -> None:
        """Stop all samples of an attempt on one worker."""
        ...

    def silent_s(self, worker_id: str) -> float:
        """Return for how long a worker's token stream has sent nothing, seconds; infinite when there is none."""
        ...

    def reachable(self, worker_id: str) -> bool:
        """Return whether the token stream of a worker stands, or may soon stand again."""
        ...

    def doubt(self, worker_id: str) -> None:
        """Have the link to a worker show that it still carries anything."""
        ...

    def tell_scheduler(self, pool: str, entry: InboxEntry) -> None:
        """Write an entry to a pool's inbox."""
        ...

    def settle(self, closed: Closed) -> None:
        """Take over a request whose numbers are final."""
        ...

    def found_cached(self, org: str, rid: str, tokens: int) -> None:
        """Give back what a request that runs reserved of uncached prompt tokens and found cached."""
        ...

    def ask_for_money(self, spender: Spender) -> None:
        """Reserve more for a request: ends in its `extended` or `cut`."""
        ...
