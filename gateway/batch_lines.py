"""The lines of a batch's input file: checked before any of them runs. Pure but for the source of bytes."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import msgspec

MAX_LINES: Final = 50_000
MAX_ERRORS: Final = 20  # told of a file that is not what it should be
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one line, or with the file (`line` None)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A good line."""

    line: int  # 1, 2, ...
    custom_id: str
    body: bytes  # JSON


class _Raw(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    model: str
    stream: Any = None
    background: Any = None


_raw = msgspec.json.Decoder(_Raw)
_body = msgspec.json.Decoder(_Body)


class LineChecker:
    """Checks the lines of one file, one after the other."""

    def __init__(self, endpoint: str, *, max_line_bytes: int) -> None:
        self.errors: list[LineError] = []
        self.num_lines = 0
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._custom_ids: set[str] = set()
        self._model: str | None = None

    def check(self, number: int, raw: bytes) -> Line | None:
        """Return the line if it is good; otherwise its error is noted."""
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            if self.num_lines == MAX_LINES + 1:
                self._note(number, "too_many_tasks", f"A batch has at most {MAX_LINES} lines.")
            return None
        if len(raw) > self._max_line_bytes:
            self._note(number, "line_too_large", f"A line has at most {self._max_line_bytes} bytes.")
            return None
        try:
            line = _raw.decode(raw)
            body = _body.decode(line.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._note(number, "invalid_json_line", f"This line is no request of a batch: {error}")
            return None
        for is_wrong, code, message, param in self._rules(line, body):
            if is_wrong:
                self._note(number, code, message, param)
                return None
        self._custom_ids.add(line.custom_id)
        self._model = body.model
        return Line(line=number, custom_id=line.custom_id, body=bytes(line.body))

    def ended(self) -> None:
        """Note that the file is at its end."""
        if not self.num_lines:
            self.errors.append(LineError(code="empty_file", message="The input file has no lines."))

    def _rules(self, line: _Raw, body: _Body) -> Sequence[tuple[bool, str, str, str]]:
        """Return what may be wrong with a line that is well formed, and whether it is."""
        url, name, model = self._endpoint, line.custom_id, self._model
        return (
            (line.method != "POST", "invalid_method", f"The method is POST, not '{line.method}'.", "method"),
            (line.url != url, "mismatched_url", f"The URL is the batch's endpoint {url}, not '{line.url}'.", "url"),
            (
                not _is_name(name),
                "invalid_custom_id",
                "A custom_id has 1 to 512 characters and no NUL.",
                "custom_id",
            ),
            (name in self._custom_ids, "duplicate_custom_id", f"The custom_id '{name}' is there twice.", "custom_id"),
            (
                model not in (None, body.model),
                "mismatched_model",
                f"All lines name one model: '{model}'.",
                "body.model",
            ),
            (bool(body.stream), "invalid_body", "A line of a batch is not streamed.", "body.stream"),
            (bool(body.background), "invalid_body", "A line is in the background anyway.", "body.background"),
        )

    def _note(self, number: int, code: str, message: str, param: str | None = None) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(LineError(code=code, message=message, line=number, param=param))


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 512 and "\0" not in text


async def lines_of(pieces: AsyncIterator[bytes], *, max_line_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yield number and bytes of each line that is not blank; one that is too long comes cut, as one byte too many."""
    number = 0
    waiting = bytearray()
    skipping = False
    async for piece in pieces:
        waiting += piece
        while (end := waiting.find(b"\n")) >= 0:
            line = bytes(waiting[:end]).strip()
            del waiting[: end + 1]
            number += 1
            if line and not skipping:
                yield number, line
            skipping = False
        if len(waiting) > max_line_bytes and not skipping:
            yield number + 1, bytes(waiting[: max_line_bytes + 1])
            skipping = True
        if skipping:
            waiting.clear()
    last = bytes(waiting).strip()
    if last and not skipping:
        yield number + 1, last


def output_line(*, batch_id: str, line: int, custom_id: str, rid: str, http_status: int, body: bytes) -> bytes:
    """Return a line of an output or error file: what the request was answered."""
    response = {"status_code": http_status, "request_id": rid, "body": msgspec.Raw(body)}
    return _line(batch_id, line, custom_id, response=response, error=None)


def unanswered_line(*, batch_id: str, line: int, custom_id: str, code: str, message: str) -> bytes:
    """Return a line of an error file: why the request was not answered."""
    return _line(batch_id, line, custom_id, response=None, error={"code": code, "message": message})


def _line(
    batch_id: str,
    line: int,
    custom_id: str,
    *,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> bytes:
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{line}"
    return msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
