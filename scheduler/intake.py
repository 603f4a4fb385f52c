"""What an inbox entry means: decode, check, hand on. Garbage ends here."""

import msgspec
import structlog

from contracts.errors import Interrupted
from contracts.identity import at_ms
from contracts.wire import Abort, Continue, InboxEntry, Refused, Submit, decode_inbox
from scheduler.book import Request
from scheduler.dispatch import Dispatcher
from scheduler.inbox import Entry
from scheduler.outbox import Outbox
from scheduler.retries import Retries
from scheduler.verdicts import Verdicts

log = structlog.get_logger()


class Intake:
    """Takes entries of one pool's inbox, in order."""

    def __init__(self, pool: str, dispatcher: Dispatcher, verdicts: Verdicts, retries: Retries, outbox: Outbox) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._verdicts = verdicts
        self._retries = retries
        self._outbox = outbox

    def take(self, entry: Entry) -> None:
        """Act on an entry. One that we fail on is put aside, its gateway told, and those after it go on."""
        message = self.read(entry)
        try:
            self._act(entry, message)
        except Exception:
            log.exception("entry_failed", pool=self._pool, entry_id=entry[0].decode())
            self._outbox.dead_letter(*entry)
            if isinstance(message, Submit):
                fault = "The scheduler failed on this request."
                self._outbox.notify(message.gateway_id, Refused(rid=message.rid, code=Interrupted.code, message=fault))

    def _act(self, entry: Entry, message: InboxEntry | None) -> None:
        entry_id, raw = entry
        match message:
            case Submit() as submit:
                fault = _fault(submit, self._pool)
                request = self._dispatcher.arrive(submit, entry_id)
                if request is not None and fault is not None:
                    self._verdicts.refuse_bad(request, fault)
            case Abort() as message:
                self._verdicts.abort(message.rid, message.reason)
                self._outbox.acknowledge(entry_id)
            case Continue() as message:
                self._retries.take(message)
                self._outbox.acknowledge(entry_id)
            case None:
                log.warning("inbox_garbage", pool=self._pool, entry_id=entry_id.decode(), num_bytes=len(raw))
                self._outbox.dead_letter(entry_id, raw)

    def read(self, entry: Entry) -> InboxEntry | None:
        """Return what is in an entry; None when it is garbage."""
        try:
            message = decode_inbox(entry[1])
            at_ms(message.rid)  # it is one of ours
        except (msgspec.MsgspecError, ValueError):
            return None
        return message

    def admit_claimed(self, submit: Submit, entry_id: bytes) -> Request | None:
        """Enter a claimed submit without queueing it; None when it is refused or known."""
        fault = _fault(submit, self._pool)
        if fault is None:
            request = self._dispatcher.enter(submit, entry_id)
            request.claimed = True
            return request
        refused = self._dispatcher.arrive(submit, entry_id)
        if refused is not None:
            self._verdicts.refuse_bad(refused, fault)
        return None


def _fault(submit: Submit, pool: str) -> str | None:
    if submit.pool != pool:
        return f"The request is for pool {submit.pool}, not {pool}."
    if not submit.prompt or len(submit.prompt) % 4:
        return "The prompt is no sequence of token ids."
    if submit.sampling.max_tokens < 1 or not 1 <= submit.num_samples <= 128:
        return "max_tokens and n must be at least 1, n at most 128."
    return None
