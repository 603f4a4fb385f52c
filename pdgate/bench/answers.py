"""One streamed answer as the client sees it: the clock of each content event, the server's own counts, the price."""

from typing import Any, Final

import msgspec

_ERROR_BYTES: Final = 16_384


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Served(msgspec.Struct, gc=False):
    cost_nano: int | None = None
    currency: str = ""
    path: str | None = None
    attempts: int = 1
    simulated: bool = False


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    pdgate: _Served | None = None
    error: Any = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the server counted them."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


_DECODER = msgspec.json.Decoder(_Chunk)


class Answer:
    """Takes the response to one streaming request (pdgate.bench.wire.Sink)."""

    def __init__(self) -> None:
        self.status = 0
        self.event_times_s: list[float] = []  # of the events that carried text, event loop's clock
        self.text: list[str] = []
        self.usage: Usage | None = None
        self.cost_nano: int | None = None
        self.currency = ""
        self.path: str | None = None
        self.attempts = 1
        self.simulated = False
        self.done = False  # [DONE] was seen
        self._error: str | None = None
        self._rest = b""

    def head(self, status: int, at_s: float) -> None:
        """Take the status."""
        del at_s
        self.status = status

    def data(self, payload: bytes, at_s: float) -> None:
        """Take some of the body."""
        self._rest += payload
        if self.status != 200:
            self._rest = self._rest[:_ERROR_BYTES]
            return
        if b"\r" in self._rest:
            self._rest = self._rest.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), at_s)

    def _event(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _DECODER.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            self._error = self._error or "bad_event"
            return
        if chunk.error is not None:
            self._error = f"stream_{_code_of(chunk.error)}"
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self.usage = Usage(
                prompt_tokens=chunk.usage.prompt_tokens,
                cached_tokens=(details.cached_tokens or 0) if details else 0,
                output_tokens=chunk.usage.completion_tokens,
            )
        if chunk.pdgate is not None:
            served = chunk.pdgate
            self.cost_nano, self.currency = served.cost_nano, served.currency
            self.path, self.attempts, self.simulated = served.path, served.attempts, served.simulated
        for choice in chunk.choices:
            said = choice.text if choice.delta is None else choice.delta.content or choice.delta.reasoning_content
            if said or (choice.delta is not None and choice.delta.tool_calls):
                self.event_times_s.append(at_s)
                self.text.append(said or "")

    @property
    def error(self) -> str | None:
        """The kind of fault: `http_429_rate_limit_exceeded`, `stream_…`, `cut` (no [DONE]), `empty`; None if whole."""
        if self.status != 200:
            return f"http_{self.status}{_suffix(self._rest)}"
        if self._error is not None:
            return self._error
        if not self.done:
            return "cut"
        return None if self.event_times_s or (self.usage and self.usage.output_tokens) else "empty"

    @property
    def said(self) -> str:
        """What a refusal said, for people."""
        return self._rest.decode(errors="replace")[:300]


def _code_of(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "error")
    return "error"


def _suffix(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return ""
    error = answer.get("error") if isinstance(answer, dict) else None
    return f"_{_code_of(error)}" if isinstance(error, dict) else ""
