"""The scheduler's refusals as errors for the client."""

from contracts.errors import (
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    Interrupted,
    NoCapacity,
    RateLimited,
    ServingError,
)
from contracts.wire import Refused


class FitsNoWorker(BadRequest):
    """Prompt and answer are longer than any worker takes: waiting does not help."""

    code = ContextTooLong.code


_CLASSES: dict[str, type[ServingError]] = {
    kind.code: kind for kind in (BadRequest, FitsNoWorker, DeadlineExceeded, Interrupted, NoCapacity, RateLimited)
}


def error_of_refusal(notice: Refused) -> ServingError:
    """Return the error that a `Refused` notice stands for; an unknown code counts as no capacity."""
    kind = _CLASSES.get(notice.code, NoCapacity)
    return kind(notice.message, retry_after_s=notice.retry_after_s)
