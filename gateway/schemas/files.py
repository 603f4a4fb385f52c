"""Files and batches in OpenAI's shapes."""

import datetime as dt
from collections.abc import Mapping, Sequence

import msgspec

from contracts.errors import BadRequest
from gateway.batch_lines import ENDPOINTS, LineError
from gateway.batches import Batch
from gateway.files import StoredFile
from gateway.schemas.decoding import decode_body

_KEPT_S = (3600, 30 * 86_400)
_ENDED_AT = {"completed": "completed_at", "failed": "failed_at", "expired": "expired_at", "cancelled": "cancelled_at"}


class FileView(msgspec.Struct, frozen=True, kw_only=True):
    """A file without its bytes."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None
    object: str = "file"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """Some of an organisation's files."""

    data: Sequence[FileView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is no more."""

    id: str
    deleted: bool = True
    object: str = "file"


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How far a batch has come."""

    total: int
    completed: int
    failed: int


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch did not run."""

    data: Sequence[LineError]
    object: str = "list"


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it stands."""

    id: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: Mapping[str, str]
    object: str = "batch"


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """Some of an organisation's batches, newest first."""

    data: Sequence[BatchView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


_decoder = msgspec.json.Decoder(BatchRequest)


def decode_batch(body: bytes) -> BatchRequest:
    """Return the request in a body. Raises BadRequest; `param` names the field."""
    request = decode_body(body, _decoder)
    if request.endpoint not in ENDPOINTS:
        raise BadRequest(f"Batches are for {', '.join(ENDPOINTS)}.", param="endpoint")
    if request.completion_window != "24h":
        raise BadRequest("The completion window is '24h'.", param="completion_window")
    metadata = request.metadata or {}
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise BadRequest(
            "'metadata' takes up to 16 pairs, keys up to 64 and values up to 512 characters.", param="metadata"
        )
    if any("\0" in text for pair in metadata.items() for text in pair):
        raise BadRequest("'metadata' holds a NUL character.", param="metadata")
    return request


def file_view(stored: StoredFile) -> FileView:
    """Return a file as the API shows it."""
    return FileView(
        id=stored.id,
        bytes=stored.bytes,
        created_at=int(stored.created_at.timestamp()),
        filename=stored.filename,
        purpose=stored.purpose,
        expires_at=_unix(stored.expires_at),
    )


def kept_of(anchor: str, seconds: str) -> dt.timedelta | None:
    """Return how long an upload is to be kept, None where it does not say. Raises BadRequest; see OpenAI's fields."""
    if not anchor and not seconds:
        return None
    if anchor != "created_at":
        raise BadRequest("The anchor is 'created_at'.", param="expires_after[anchor]")
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10 and _KEPT_S[0] <= int(seconds) <= _KEPT_S[1]):
        raise BadRequest(f"A file is kept {_KEPT_S[0]} to {_KEPT_S[1]} seconds.", param="expires_after[seconds]")
    return dt.timedelta(seconds=int(seconds))


def batch_view(batch: Batch) -> BatchView:
    """Return a batch as the API shows it."""
    view = BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=BatchErrors(data=batch.errors) if batch.errors else None,
        input_file_id=batch.input_file_id,
        completion_window="24h",
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=int(batch.created_at.timestamp()),
        in_progress_at=_unix(batch.in_progress_at),
        expires_at=int(batch.expires_at.timestamp()),
        finalizing_at=_unix(batch.finalizing_at),
        cancelling_at=_unix(batch.cancelling_at),
        request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        metadata=batch.metadata,
    )
    field = _ENDED_AT.get(batch.status)
    return view if field is None else msgspec.structs.replace(view, **{field: _unix(batch.ended_at)})


def _unix(moment: dt.datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
