"""What a client says about a request for its own books: stored with the usage, never a metric label."""

from collections.abc import Mapping
from typing import Final

import msgspec

MAX_TAGS: Final = 8
MAX_TAG_NAME: Final = 64  # characters
MAX_TAG_VALUE: Final = 128
MAX_NAME: Final = 128  # characters of a user, a safety identifier or a reference


class Dimensions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Group-by dimensions of one request. Longer text is cut, more tags are left out."""

    user: str = ""
    safety_identifier: str = ""  # the client's own, or its keyed hash where the project asks for that
    reference: str = ""  # the client's x-request-id
    tags: Mapping[str, str] = {}


NO_DIMENSIONS: Final = Dimensions()


def dimensions(
    *,
    user: str | None = None,
    safety_identifier: str | None = None,
    reference: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Dimensions:
    """Return what a request said, cut to the lengths above; NO_DIMENSIONS when it said nothing."""
    if not (user or safety_identifier or reference or metadata):
        return NO_DIMENSIONS
    kept = list((metadata or {}).items())[:MAX_TAGS]
    return Dimensions(
        user=_plain(user or "", MAX_NAME),
        safety_identifier=_plain(safety_identifier or "", MAX_NAME),
        reference=_plain(reference or "", MAX_NAME),
        tags={_plain(name, MAX_TAG_NAME): _plain(value, MAX_TAG_VALUE) for name, value in kept},
    )


def _plain(text: str, length: int) -> str:
    """Return the start of a text without what PostgreSQL or a log line cannot hold: control characters and halves."""
    cut = text[:length]
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(c for c in cut if c.isprintable() and not "\ud800" <= c <= "\udfff")
