"""Readers of traffic traces. Compressed files (.gz, .xz) are read as they are.

Formats, told apart by their first line:

* Azure LLM inference trace (CSV): `TIMESTAMP,ContextTokens,GeneratedTokens`.
* Mooncake trace (JSON lines): `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.
* pdgate's decision log (JSON lines that begin with a head; `pdgate.plan.decision_log`).
* OpenAI-style request log (JSON lines): any object with a `usage` (also under `response` or `response.body`, as in
  batch output files) and a time in `created`, `created_at`, `timestamp` or `time` (Unix seconds or ISO 8601).
"""

import gzip
import lzma
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

from pdgate.plan.decision_log import is_decision_log, read_decision_log
from pdgate.plan.workload import Request, Workload, WorkloadError, workload_of

MOONCAKE_BLOCK_TOKENS = 512
TIME_FIELDS = ("created", "created_at", "timestamp", "time")
MAX_BAD_LINES = 0.01  # share of a log's lines that may lack usage (errors, health checks) before it is refused
FAILED_LINE = "no usage with prompt and output tokens"


class _Mooncake(msgspec.Struct, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(file: Path) -> Workload:
    """Return the traffic recorded in `file`.

    Raises:
        WorkloadError: unreadable, an unknown format, or a line that is not of the format (with its number).
    """
    try:
        with _open(file) as lines:
            first = lines.readline()
            if is_decision_log(first):
                return read_decision_log(file)
            rest = _numbered(lines)
            return _read(file, first, rest)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{file}: {error}") from None


def _read(file: Path, first: str, rest: Iterable[tuple[int, str]]) -> Workload:
    name = file.name.split(".")[0]
    if first.lstrip("\ufeff").strip().lower().startswith("timestamp,contexttokens,generatedtokens"):
        return workload_of([_azure(file, n, line) for n, line in rest], name=name, source="Azure LLM inference trace")
    try:
        probe = msgspec.json.decode(first)
    except msgspec.DecodeError:
        raise WorkloadError(
            f"{file}:1: neither an Azure CSV, a Mooncake JSONL, a decision log nor an OpenAI-style request log "
            "in JSON lines"
        ) from None
    lines = [(1, first), *rest]
    if isinstance(probe, dict) and "input_length" in probe:
        requests = [_mooncake(file, n, line) for n, line in lines]
        return workload_of(requests, name=name, block_tokens=MOONCAKE_BLOCK_TOKENS, source="Mooncake trace")
    return _request_log(file, name, lines)


def _open(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    if file.suffix == ".xz":
        return lzma.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def _numbered(lines: TextIO) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=2):
        if line.strip():
            yield number, line


def _azure(file: Path, number: int, line: str) -> Request:
    try:
        time, prompt, output = line.rstrip().split(",")
        # seven decimals in the file; datetime takes six
        whole, _, fraction = time.partition(".")
        at = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp() + float(f"0.{fraction or 0}")
        return Request(arrival_s=at, prompt_tokens=int(prompt), output_tokens=int(output))
    except ValueError:
        raise WorkloadError(f"{file}:{number}: expected time,prompt tokens,output tokens") from None


_DECODE_MOONCAKE = msgspec.json.Decoder(_Mooncake)


def _mooncake(file: Path, number: int, line: str) -> Request:
    try:
        row = _DECODE_MOONCAKE.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WorkloadError(f"{file}:{number}: {error}") from None
    return Request(
        arrival_s=row.timestamp / 1000,
        prompt_tokens=row.input_length,
        output_tokens=row.output_length,
        blocks=row.hash_ids,
    )


def _request_log(file: Path, name: str, lines: Iterable[tuple[int, str]]) -> Workload:
    requests: list[Request] = []
    bad: list[str] = []
    for number, line in lines:
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise WorkloadError(f"{file}:{number}: {error}") from None
        found = _from_log(record)
        if isinstance(found, Request):
            requests.append(found)
        else:
            bad.append(f"{file}:{number}: {found}")
    if len(bad) > MAX_BAD_LINES * (len(requests) + len(bad)):
        raise WorkloadError(f"{bad[0]} ({len(bad)} such lines)")
    return workload_of(requests, name=name, source="OpenAI-style request log")


def _from_log(record: Any) -> Request | str:
    if not isinstance(record, dict):
        return "expected a JSON object"
    holders = [record]
    response = record.get("response")
    if isinstance(response, dict):
        holders += [response, response.get("body") or {}]
    usage = next((h["usage"] for h in holders if isinstance(h, dict) and isinstance(h.get("usage"), dict)), None)
    at = next((h[f] for h in holders if isinstance(h, dict) for f in TIME_FIELDS if h.get(f) is not None), None)
    if usage is None:
        return FAILED_LINE
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    output = usage.get("completion_tokens", usage.get("output_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    if not isinstance(prompt, int) or not isinstance(output, int) or prompt <= 0:
        return FAILED_LINE
    arrival_s = _seconds(at)
    if arrival_s is None:
        return f"no time in any of {', '.join(TIME_FIELDS)}"
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Request(
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=max(1, output),
        cached_tokens=cached if isinstance(cached, int) else None,
    )


def _seconds(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value / 1000 if value > 1e11 else float(value)  # Unix milliseconds are beyond the year 5000 in seconds
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None
