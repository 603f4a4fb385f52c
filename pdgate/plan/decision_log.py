"""Traffic read back from the scheduler's decision log: what arrived, and how long the answers were.

A full file is rotated to `POOL.1.jsonl`, `POOL.2.jsonl` …; given `POOL.jsonl` the older ones beside it are read first.
Requests that were refused or have not ended are traffic too: their answer is taken to have the median length of the
others. Where the log has no prefix blocks, the engine's own count of cached tokens stands for them.
"""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from pdgate.plan.workload import Request, Workload, WorkloadError, workload_of
from scheduler.policy.decisions import Arrived, Ended, Head, LogError, decode

HEAD = '{"kind":"head"'


def is_decision_log(first: str) -> bool:
    """Return whether a file that begins with this line is a decision log."""
    return first.replace(" ", "").startswith(HEAD)


def read_decision_log(file: Path) -> Workload:
    """Return the traffic that a pool's scheduler saw.

    Raises:
        WorkloadError: a line that is no record (with its number), or no request that has ended.
        OSError: unreadable.
    """
    arrivals: dict[str, tuple[float, Arrived]] = {}
    ended: dict[str, Ended] = {}
    blocks: set[int] = set()
    for part in _parts(file):
        with part.open("rb") as lines:
            _read(part, lines, arrivals, ended, blocks)
    answered = [e.output_tokens for e in ended.values() if e.output_tokens > 0]
    if not answered:
        raise WorkloadError(f"{file}: {len(arrivals)} requests arrived, none has an answer")
    usual = round(statistics.median(answered))
    block_tokens = blocks.pop() if len(blocks) == 1 else 0
    requests = [_request(at_s, a, ended.get(rid), usual, block_tokens) for rid, (at_s, a) in arrivals.items()]
    return workload_of(requests, name=file.stem, block_tokens=block_tokens or 512, source="pdgate decision log")


def _parts(file: Path) -> Iterator[Path]:
    """The rotated files of the log, oldest first, and the file itself."""
    older = [p for p in file.parent.glob(f"{file.stem}.*{file.suffix}") if p.name.split(".")[-2].isdigit()]
    yield from sorted(older, key=lambda p: -int(p.name.split(".")[-2]))
    yield file


def _read(
    file: Path,
    lines: Iterable[bytes],
    arrivals: dict[str, tuple[float, Arrived]],
    ended: dict[str, Ended],
    blocks: set[int],
) -> None:
    zero_ms = 0.0
    try:
        for record in decode(lines):
            match record:
                case Head():
                    zero_ms = float(record.at_unix_ms)
                    blocks.add(record.block_tokens)
                case Arrived():
                    # a retried or adopted request arrives once
                    arrivals.setdefault(record.rid, ((zero_ms + record.at_ms) / 1000, record))
                case Ended():
                    ended[record.rid] = record
                case _:
                    pass
    except LogError as error:
        raise WorkloadError(f"{file}: {error}") from None


def _request(at_s: float, arrived: Arrived, ended: Ended | None, usual: int, block_tokens: int) -> Request:
    known = ended is not None and ended.output_tokens > 0
    return Request(
        arrival_s=at_s,
        prompt_tokens=max(1, arrived.prompt_tokens),
        output_tokens=ended.output_tokens if ended is not None and known else min(usual, arrived.max_tokens),
        blocks=arrived.blocks if block_tokens else (),
        cached_tokens=ended.cached_tokens if ended is not None and known and not block_tokens else None,
        session=arrived.session,
    )
