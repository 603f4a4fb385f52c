"""Write-ahead: a placement is in Redis before any worker hears of it."""

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from contracts import keys
from contracts.resp import Argument, RespConnection, Script
from contracts.wire import Inflight, encode
from scheduler.book import Request
from scheduler.leader import LeaderLease, LeadershipLost

_KEEP_MS = 3_600_000
"""How long after the deadline a record that nobody deleted goes by itself."""

decode_record = msgspec.msgpack.Decoder(Inflight).decode


class Placed(msgspec.Struct, frozen=True):
    """A request whose parts are chosen, and the attempt they replace (0 = none)."""

    request: Request
    replaces: int


class WriteAhead:
    """The in-flight records of one pool."""

    def __init__(self, connection: RespConnection, pool: str, lease: LeaderLease) -> None:
        self._script = Script(connection, (files("scheduler") / "inflight.lua").read_text())
        self._pool = pool
        self._lease = lease

    async def write(self, placed: Sequence[Placed]) -> list[int]:
        """Record all placements in one step; return 0 for each written one, else the attempt in its way.

        Raises:
            LeadershipLost: the lease is another's; nothing was written.
            redis.exceptions.RedisError: unknown whether it was written; repeating is safe.
        """
        names = [keys.leader(self._pool)]
        args: list[Argument] = [self._lease.value]
        for item in placed:
            request = item.request
            names.append(keys.inflight(self._pool, request.rid))
            args += [item.replaces, self._record(request), request.submit.deadline_unix_ms + _KEEP_MS]
        answers: list[int] = await self._script(names, args)
        if not answers:
            raise LeadershipLost("the write-ahead script found another leader")
        return answers

    def _record(self, request: Request) -> bytes:
        assert request.path is not None
        assert request.decode_ref is not None
        return encode(
            Inflight(
                rid=request.rid,
                entry_id=request.entry_id.decode(),
                attempt=request.attempt,
                leader_epoch=self._lease.epoch,
                path=request.path,
                hand_off=request.hand_off_now,
                decode=request.decode_ref,
                prefill=request.prefill_ref,
                rooms=request.rooms,
                continued=request.delivered is None or bool(request.delivered),
                done=tuple(sorted(request.done)),
            )
        )
