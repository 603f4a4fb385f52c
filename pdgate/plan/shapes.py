"""The ways to divide GPUs into prefill, decode and unified workers."""

import enum
from collections.abc import Iterator, Sequence

import msgspec

from pdgate.plan.fleet import Worker

SHORT_PROMPTS = (0, 256, 512, 1024, 2048)  # up to so many uncached tokens go to unified workers; 0 = balanced load
FLOOR_FROM, FLOOR = 6, 2  # from six workers on a split keeps two of each role
UNIFIED_FLOOR_FROM = 8  # from eight on also one unified worker, for short prompts and fallback


class Kind(enum.StrEnum):
    """The ways compared."""

    UNIFIED = "unified"
    SPLIT_NO_REUSE = "split without prefix reuse"
    SPLIT = "split with prefix reuse"
    STORE = "split through a KV store"
    MIXED = "mixed"
    HETEROGENEOUS = "split over two kinds of GPU"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Workers per role."""

    kind: Kind
    prefill: int = 0
    decode: int = 0
    unified: int = 0
    prefill_worker: Worker | None = None
    decode_worker: Worker | None = None
    unified_worker: Worker | None = None
    short_prompt_tokens: int = 0  # up to so many uncached tokens go to unified workers

    @property
    def price_per_hour(self) -> float:
        """Price of all its GPUs."""
        return sum(count * worker.price_per_hour for count, worker in self.pools())

    @property
    def gpus(self) -> int:
        """GPUs of all its workers."""
        return sum(count * worker.use.gpus for count, worker in self.pools())

    def roles(self) -> Iterator[tuple[str, Worker]]:
        """Return the name of each role that has workers, and their kind."""
        for role, count, worker in self._all():
            if count and worker is not None:
                yield role, worker

    def pools(self) -> Iterator[tuple[int, Worker]]:
        """Return count and kind of worker of each role that has any."""
        for _, count, worker in self._all():
            if count and worker is not None:
                yield count, worker

    def text(self) -> str:
        """As people write it."""
        present = [(role, count, worker) for role, count, worker in self._all() if count and worker is not None]
        names = {worker.gpu.name for _, _, worker in present}
        several = len(names) > 1
        parts = [
            f"{count} {role} {worker.label}" + (f" on {worker.gpu.name}" if several else "")
            for role, count, worker in present
        ]
        return " + ".join(parts) + ("" if several else f" on {names.pop()}")

    def _all(self) -> tuple[tuple[str, int, Worker | None], ...]:
        return (
            ("prefill", self.prefill, self.prefill_worker),
            ("decode", self.decode, self.decode_worker),
            ("unified", self.unified, self.unified_worker),
        )


def unified_shapes(workers: Sequence[Worker], gpus: int) -> Iterator[Shape]:
    """Return all-unified fleets on so many GPUs, one for each kind of worker."""
    for worker in workers:
        if gpus >= worker.use.gpus:
            yield Shape(kind=Kind.UNIFIED, unified=gpus // worker.use.gpus, unified_worker=worker)


def split_shapes(
    kind: Kind, prefill: Sequence[Worker], decode: Sequence[Worker], gpus: int, *, decode_gpus: int | None = None
) -> Iterator[Shape]:
    """Return every division of the GPUs into prefill and decode workers, from eight workers on with one unified.

    None where no engine hands KV over.

    Args:
        kind: which way.
        prefill: kinds of prefill worker.
        decode: kinds of decode worker.
        gpus: GPUs of both, or of the prefill workers if `decode_gpus` is given.
        decode_gpus: GPUs of a second kind that only decode.
    """
    for p_worker in prefill:
        for d_worker in decode:
            if not (p_worker.gpu.hands_off and d_worker.gpu.hands_off):
                continue
            if decode_gpus is not None:
                p, d = gpus // p_worker.use.gpus, decode_gpus // d_worker.use.gpus
                if p and d:
                    yield _split_shape(kind, p, d, p_worker, d_worker)
                continue
            for p in range(1, gpus // p_worker.use.gpus + 1):
                left = gpus - p * p_worker.use.gpus
                d = left // d_worker.use.gpus
                standby = int(p + d >= UNIFIED_FLOOR_FROM)
                d = (left - standby * p_worker.use.gpus) // d_worker.use.gpus
                if d >= 1 and keeps_floors(p, d):
                    yield _split_shape(kind, p, d, p_worker, d_worker, standby)


def mixed_shapes(workers: Sequence[Worker], gpus: int) -> Iterator[Shape]:
    """Return divisions into prefill, decode and unified workers, for each length threshold.

    Unified workers are of the prefill workers' kind and at most a third of the fleet; large fleets are divided in
    steps of a twenty-fourth.
    """
    for p_worker in workers:
        for d_worker in workers:
            if not (p_worker.gpu.hands_off and d_worker.gpu.hands_off):
                continue
            size, total = p_worker.use.gpus, gpus // p_worker.use.gpus
            step = max(1, total // 24)
            for unified in range(1, max(2, total // 3 + 1), step):
                for p in range(1, total - unified + 1, step):
                    d = (gpus - (p + unified) * size) // d_worker.use.gpus
                    if d >= 1 and keeps_floors(p, d, unified):
                        yield from (
                            Shape(
                                kind=Kind.MIXED,
                                prefill=p,
                                decode=d,
                                unified=unified,
                                prefill_worker=p_worker,
                                decode_worker=d_worker,
                                unified_worker=p_worker,
                                short_prompt_tokens=threshold,
                            )
                            for threshold in SHORT_PROMPTS
                        )


def keeps_floors(prefill: int, decode: int, unified: int = 0) -> bool:
    """Return whether a split keeps the scheduler's floors: two of each role from six workers on."""
    return prefill + decode + unified < FLOOR_FROM or min(prefill, decode) >= FLOOR


def _split_shape(kind: Kind, p: int, d: int, p_worker: Worker, d_worker: Worker, standby: int = 0) -> Shape:
    """A split, with or without a unified worker that takes its share of the load."""
    return Shape(
        kind=kind,
        prefill=p,
        decode=d,
        unified=standby,
        prefill_worker=p_worker,
        decode_worker=d_worker,
        unified_worker=p_worker if standby else None,
    )
