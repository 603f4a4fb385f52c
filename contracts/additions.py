"""Models that operators add while everything runs, beside the catalogue's file.

1. The gateway keeps them (`gateway.model_book`, PostgreSQL) and writes all of them to one key of Redis, when one
   changes and every few seconds, so that a Redis that lost its data has them again.
2. Every process reads that key: gateways from their own table, schedulers and billing every few seconds, workers when
   they start. `LiveModels` is the part of a catalogue that grows and shrinks.
3. The file comes first: what it names is never hidden by an added model.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from contracts import keys
from contracts.catalog import Catalog, Model
from contracts.lifecycle import Role

_READ_S: Final = 2.0


class AddedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model beside the file, and the workers that `pdgate up` runs for it."""

    name: str  # public
    model: Model
    folder: str  # of weights and tokenizer, as workers load it
    prefill: int = 0
    decode: int = 0
    unified: int = 0
    profile: str = ""  # of workers/profiles; empty = the engine's own arguments

    @property
    def pool(self) -> str:
        """Return the pool whose workers serve it."""
        return self.model.pool or self.name

    @property
    def workers(self) -> Mapping[str, Role]:
        """Return the workers that `pdgate up` runs for it: role by id."""
        counts = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.UNIFIED, self.unified))
        return {f"{self.pool}-{role}-{n}": role for role, count in counts for n in range(1, count + 1)}


class LiveModels(Mapping[str, Model]):
    """The file's models, followed by those that were added last. Whoever iterates sees one state of it."""

    def __init__(self, file: Mapping[str, Model]) -> None:
        self._file = file
        self._now: Mapping[str, Model] = file
        self._added: Mapping[str, AddedModel] = {}

    def take(self, added: Iterable[AddedModel]) -> None:
        """Have exactly these beside the file's; those whose name or alias is taken are left out."""
        now, mine = dict(self._file), {}
        taken = {name for public, model in now.items() for name in (public, *model.aliases)}
        for one in added:
            names = {one.name, *one.model.aliases}
            if not names & taken:
                now[one.name], mine[one.name] = one.model, one
                taken |= names
        self._now, self._added = now, mine

    def added(self, name: str) -> AddedModel | None:
        """Return how a model was added; None for the file's."""
        return self._added.get(name)

    def from_file(self, name: str) -> bool:
        """Return whether the file names a model."""
        return name in self._file

    def __getitem__(self, name: str) -> Model:
        return self._now[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)


def live(catalog: Catalog) -> tuple[Catalog, LiveModels]:
    """Return a catalogue that can grow, and what makes it grow."""
    models = LiveModels(catalog.models)
    return msgspec.structs.replace(catalog, models=models), models


def encode_added(added: Iterable[AddedModel]) -> bytes:
    """Return the form kept in Redis."""
    return msgspec.msgpack.encode(tuple(added))


def decode_added(raw: bytes | None) -> tuple[AddedModel, ...]:
    """Return what is kept in Redis. Raises msgspec.MsgspecError on garbage."""
    return msgspec.msgpack.decode(raw, type=tuple[AddedModel, ...]) if raw else ()


async def read_added(redis: Redis) -> tuple[AddedModel, ...] | None:
    """Return all models that were added; None when nobody has said yet.

    Raises:
        RedisError, TimeoutError, OSError: Redis does not answer.
        MsgspecError: another version wrote what we cannot read.
    """
    async with asyncio.timeout(_READ_S):
        raw: Any = await redis.get(keys.ADDED_MODELS)
    return None if raw is None else decode_added(raw)
