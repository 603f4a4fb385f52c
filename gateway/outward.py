"""What generations set in motion beyond themselves: on workers, at the scheduler, and at their end."""

from collections.abc import Callable

from contracts.usage import Outcome
from contracts.v1 import worker_pb2 as pb
from contracts.wire import InboxEntry
from gateway.fleet import Fleet
from gateway.inbox import Inbox
from gateway.lengths import Lengths
from gateway.purse import Purse, Spender
from gateway.settlement import Settlement
from gateway.terms import Closed


class Outward:
    """What generations set in motion, passed to the parts that do it."""

    def __init__(self, fleet: Fleet, inbox: Inbox, settlement: Settlement, *, purse: Purse, lengths: Lengths) -> None:
        self.abort_on_worker: Callable[[str, pb.AttemptId, str], None] = fleet.abort_on_worker
        self.silent_s: Callable[[str], float] = fleet.silent_s
        self.reachable: Callable[[str], bool] = fleet.reachable
        self.doubt: Callable[[str], None] = fleet.doubt
        self.tell_scheduler: Callable[[str, InboxEntry], None] = inbox.tell
        self.ask_for_money: Callable[[Spender], None] = purse.ask
        self.found_cached: Callable[[str, str, int], None] = purse.found_cached
        self._settlement = settlement
        self._lengths = lengths

    def settle(self, closed: Closed) -> None:
        """Hand a closed request to settlement, and learn from it."""
        event = closed.event
        if event.outcome is Outcome.FINISHED and event.tokens.decode:  # none: a prompt computed ahead
            self._lengths.ended(event.org, event.model, event.tokens.decode)
        self._settlement.offer(closed)
