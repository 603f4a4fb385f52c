"""`/v1/files` and `/v1/batches`."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

from litestar import Request, Response, delete, get, post
from litestar.datastructures import UploadFile
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from contracts.errors import BadRequest, RateLimited
from gateway.batch_runner import BatchRunner
from gateway.batches import Batches
from gateway.bodies import read_by
from gateway.files import KEPT, Files, check_purpose
from gateway.guard import Guard
from gateway.openapi import form_operation, json_operation
from gateway.schemas.files import (
    BatchList,
    BatchRequest,
    BatchView,
    FileDeleted,
    FileList,
    FileView,
    batch_view,
    decode_batch,
    file_view,
    kept_of,
)
from gateway.starter import Starter

Http = Request[Any, Any, Any]
UPLOAD_S: Final = 600.0
MAX_OPEN_BATCHES: Final = 100  # of one organisation
_FORM_SLACK_BYTES: Final = 64 * 1024
_CHUNK: Final = 256 * 1024

Name = Annotated[str | None, QueryParameter(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
Limit = Annotated[int, QueryParameter(ge=1, le=100)]
FileLimit = Annotated[int, QueryParameter(ge=1, le=10_000)]


def file_routes(guard: Guard, files: Files, *, max_file_bytes: int) -> list[HTTPRouteHandler]:
    """Return the handlers of files."""

    @post(
        "/v1/files",
        status_code=200,
        summary="Upload a file",
        operation_id="createFile",
        tags=["files"],
        operation_class=form_operation(FileView),
        request_max_body_size=max_file_bytes + _FORM_SLACK_BYTES,
    )
    async def create_file(request: Http) -> FileView:
        """Store a JSONL file of requests for a batch."""
        key = await guard.key_of(request)
        form = await read_by(request.form(), timeout_s=UPLOAD_S)
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise BadRequest("Send the file as multipart form data, in the field 'file'.", param="file")
        purpose = check_purpose(str(form.get("purpose") or ""))
        kept = kept_of(*(str(form.get(f"expires_after[{name}]") or "") for name in ("anchor", "seconds")))
        try:
            stored = await files.create(
                key.organisation_id,
                key.project_id,
                _pieces(upload),
                purpose=purpose,
                filename=_filename(upload),
                kept=kept or KEPT,
            )
        finally:
            await upload.close()
        return file_view(stored)

    @get("/v1/files", summary="List files", operation_id="listFiles", tags=["files"])
    async def list_files(
        request: Http,
        purpose: Name = None,
        after: Name = None,
        limit: FileLimit = 100,
        order: Annotated[str, QueryParameter(pattern="^(asc|desc)$")] = "desc",
    ) -> FileList:
        """Return your organisation's files."""
        key = await guard.key_of(request)
        found = await files.list(
            key.organisation_id, purpose=purpose, after=after, limit=limit + 1, newest_first=order == "desc"
        )
        data = [file_view(one) for one in found[:limit]]
        return FileList(
            data=data,
            has_more=len(found) > limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )

    @get("/v1/files/{file_id:str}", summary="Get a file", operation_id="getFile", tags=["files"])
    async def get_file(request: Http, file_id: FromPath[str]) -> FileView:
        """Return what is known of a file."""
        key = await guard.key_of(request)
        return file_view(await files.find(key.organisation_id, file_id))

    @delete(
        "/v1/files/{file_id:str}", status_code=200, summary="Delete a file", operation_id="deleteFile", tags=["files"]
    )
    async def delete_file(request: Http, file_id: FromPath[str]) -> Response[FileDeleted]:
        """Forget a file. A batch that has read it goes on."""
        key = await guard.key_of(request)
        await files.delete(key.organisation_id, file_id)
        return Response(FileDeleted(id=file_id))

    @get(
        "/v1/files/{file_id:str}/content",
        summary="Get a file's content",
        operation_id="getFileContent",
        tags=["files"],
        media_type="application/jsonl",
    )
    async def get_file_content(request: Http, file_id: FromPath[str]) -> Stream:
        """Return the bytes of a file."""
        key = await guard.key_of(request)
        stored = await files.find(key.organisation_id, file_id)
        return Stream(
            files.read(key.organisation_id, file_id),
            media_type="application/jsonl",
            headers={"content-length": str(stored.bytes)},
        )

    return [create_file, list_files, get_file, delete_file, get_file_content]


def batch_routes(
    starter: Starter, guard: Guard, files: Files, batches: Batches, runner: BatchRunner
) -> list[HTTPRouteHandler]:
    """Return the handlers of batches."""

    @post(
        "/v1/batches",
        status_code=200,
        summary="Create a batch",
        operation_id="createBatch",
        tags=["batches"],
        operation_class=json_operation(BatchRequest, BatchView),
        request_max_body_size=None,  # read_body bounds it
    )
    async def create_batch(request: Http) -> BatchView:
        """Run the requests of a file within 24 hours, behind all others and at the batch price."""
        arrival = await starter.arrive(request, confirm=True)
        asked, key = decode_batch(arrival.body), arrival.key
        guard.check_endpoint(request, key, asked.endpoint)
        await files.find(key.organisation_id, asked.input_file_id)
        if await batches.num_open(key.organisation_id) >= MAX_OPEN_BATCHES:
            raise RateLimited(f"An organisation may have {MAX_OPEN_BATCHES} batches at a time.", retry_after_s=60)
        created = await batches.create(
            key.organisation_id,
            project_id=key.project_id,
            key_id=key.id,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            metadata=asked.metadata or {},
        )
        runner.wake()
        return batch_view(created)

    @get("/v1/batches", summary="List batches", operation_id="listBatches", tags=["batches"])
    async def list_batches(request: Http, after: Name = None, limit: Limit = 20) -> BatchList:
        """Return your organisation's batches, newest first."""
        key = await guard.key_of(request)
        found = await batches.list(key.organisation_id, after=after, limit=limit + 1)
        data = [batch_view(one) for one in found[:limit]]
        return BatchList(
            data=data,
            has_more=len(found) > limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )

    @get("/v1/batches/{batch_id:str}", summary="Get a batch", operation_id="getBatch", tags=["batches"])
    async def get_batch(request: Http, batch_id: FromPath[str]) -> BatchView:
        """Return a batch as it stands."""
        key = await guard.key_of(request)
        return batch_view(await batches.find(key.organisation_id, batch_id))

    @post(
        "/v1/batches/{batch_id:str}/cancel",
        status_code=200,
        summary="Cancel a batch",
        operation_id="cancelBatch",
        tags=["batches"],
    )
    async def cancel_batch(request: Http, batch_id: FromPath[str]) -> BatchView:
        """Stop a batch. What was answered until then is in its output file."""
        key = await guard.key_of(request)
        cancelled = await batches.cancel(key.organisation_id, batch_id)
        runner.cancelled(cancelled.id)
        return batch_view(cancelled)

    return [create_batch, list_batches, get_batch, cancel_batch]


async def _pieces(upload: UploadFile) -> AsyncIterator[bytes]:
    while piece := await upload.read(_CHUNK):
        yield piece


def _filename(upload: UploadFile) -> str:
    return (upload.filename or "").replace("\0", "")[:512] or "file"
