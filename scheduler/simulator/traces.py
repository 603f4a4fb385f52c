"""Readers of public traces, `.gz` and `.xz` as they are. Times become seconds from the first request."""

import csv
import enum
import gzip
import lzma
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

import msgspec

from scheduler.simulator.arrivals import Arrival


class TraceError(ValueError):
    """The file is not a trace we know; the message names file and line."""


class TraceKind(enum.StrEnum):
    """The formats that can be read."""

    AZURE_CSV = "azure_csv"  # TIMESTAMP,ContextTokens,GeneratedTokens
    MOONCAKE_JSONL = "mooncake_jsonl"  # timestamp (ms), input_length, output_length, hash_ids


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def kind_of(file: Path) -> TraceKind:
    """Return a file's format, by its first line. Raises TraceError."""
    try:
        with _open(file) as lines:
            first = lines.readline()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: {error}") from None
    if first.startswith("{"):
        return TraceKind.MOONCAKE_JSONL
    if first.strip().replace(" ", "").upper().startswith("TIMESTAMP,CONTEXTTOKENS,GENERATEDTOKENS"):
        return TraceKind.AZURE_CSV
    raise TraceError(
        f"{file}: neither a CSV with TIMESTAMP,ContextTokens,GeneratedTokens nor JSON lines with "
        "timestamp, input_length, output_length"
    )


def read_trace(file: Path) -> list[Arrival]:
    """Return the requests of a trace in the order of time. Raises TraceError."""
    reader = _azure if kind_of(file) is TraceKind.AZURE_CSV else _mooncake
    arrivals = sorted(reader(file), key=lambda arrival: arrival.at_s)
    if not arrivals:
        raise TraceError(f"{file}: no requests")
    start_s = arrivals[0].at_s
    return [msgspec.structs.replace(a, at_s=a.at_s - start_s) for a in arrivals]


def _open(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", newline="")
    if file.suffix == ".xz":
        return lzma.open(file, "rt", encoding="utf-8", newline="")
    return file.open(encoding="utf-8", newline="")


def _azure(file: Path) -> Iterator[Arrival]:
    with _open(file) as lines:
        rows = csv.reader(lines)
        next(rows)
        for number, row in enumerate(rows, start=2):
            if not row:
                continue
            try:
                stamp, prompt, output = row[:3]
                # Seven decimals of a second; datetime takes six.
                at_s = datetime.fromisoformat(stamp.strip()[:26] + "+00:00").timestamp()
                yield _arrival(at_s, int(prompt), int(output))
            except ValueError as error:
                raise TraceError(f"{file}:{number}: {error}") from None


def _mooncake(file: Path) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with _open(file) as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            try:
                line = decoder.decode(raw)
                yield _arrival(line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)
            except (msgspec.DecodeError, ValueError) as error:
                raise TraceError(f"{file}:{number}: {error}") from None


def _arrival(at_s: float, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Arrival:
    if prompt < 1 or output < 1:
        raise ValueError(f"prompt of {prompt} and output of {output} tokens; both must be at least 1")
    return Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output, max_tokens=max(4096, output), blocks=blocks)
