"""The scheduler's refusals as errors for the client."""

import re
from typing import Final

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


_NAMED: Final = re.compile(r"'([a-z_]+)': ")  # a worker's words about one parameter begin with its name
_CLASSES: dict[str, type[ServingError]] = {
    kind.code: kind for kind in (BadRequest, FitsNoWorker, DeadlineExceeded, Interrupted, NoCapacity, RateLimited)
}


def error_of_refusal(notice: Refused) -> ServingError:
    """Return the error that a `Refused` notice stands for; an unknown code counts as no capacity."""
    kind = _CLASSES.get(notice.code, NoCapacity)
    named = _NAMED.match(notice.message) if kind is BadRequest else None
    return kind(notice.message, retry_after_s=notice.retry_after_s, param=named.group(1) if named else None)
