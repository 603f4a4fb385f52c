"""Both ways to Redis: redis-py's client for what is rare, a pipelining connection for what happens per request.

Calls of a `RespConnection` made in one turn of the event loop leave in one write, and replies come back in
order. A call costs about 10 us of CPU there against 75 us through redis-py (its pool, retries and per-call
bookkeeping). Errors are redis-py's, so callers catch `RedisError` either way.

A call that breaks off after it was written may have been carried out: callers' commands are idempotent or
their effects are looked up afterwards.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

Argument = str | bytes | int
Command = tuple[Argument, ...]
ScriptCall = tuple[Sequence[str], Sequence[Argument]]
"""Keys and arguments of one call of a script."""

_CONNECT_TIMEOUT_S = 2.0
_SECOND_LOOK_S = 0.25
_UNWILLING = frozenset(
    ("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN")
)


def redis_client(url: str, *, max_connections: int | None = None) -> Redis:
    """Return a client whose calls can be cancelled.

    With a socket timeout redis-py 8.1 sends through `asyncio.wait_for`, which on Python 3.11 loses a cancellation
    that arrives as the send ends: a loop that was told to stop goes on. So there is none, and calls that need a
    deadline carry their own `asyncio.timeout`. Raises ValueError when `url` is no Redis URL.
    """
    return Redis.from_url(url, max_connections=max_connections, socket_timeout=None)


class Unwilling(RedisConnectionError):
    """Redis answers and takes no such command now: it loads its data, is full, or is a replica. Try later.

    So a plain ResponseError means that the command itself is at fault and would be refused again.
    """


class _Asked:
    """Commands that left together, and the replies that have come."""

    __slots__ = ("asked_s", "future", "num_commands", "replies")

    def __init__(self, future: asyncio.Future[Any], num_commands: int, asked_s: float) -> None:
        """`num_commands` 0 = one command, whose reply is the future's result; otherwise that is a list."""
        self.future = future
        self.num_commands = num_commands
        self.asked_s = asked_s
        self.replies: list[Any] = []

    def replied(self, reply: Any) -> bool:
        """Take the next reply; return whether it was the last."""
        if self.num_commands:
            self.replies.append(reply)
            if len(self.replies) < self.num_commands:
                return False
            reply = self.replies
        if self.future.done():  # its caller was cancelled
            return True
        if isinstance(reply, Exception):
            self.future.set_exception(reply)
        else:
            self.future.set_result(reply)
        return True


class _Protocol(asyncio.Protocol):
    """The byte stream: packs what is asked in one loop turn, matches replies to futures.

    Replies come in order, so one timer, for the oldest of those who wait, is enough for all.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._patience_s = 0.0
        self._resting: asyncio.TimerHandle | None = None  # until then nothing is read
        self._timer: asyncio.TimerHandle | None = None
        self._reader = hiredis.Reader(replyError=_error)
        self._waiting: deque[_Asked] = deque()
        self._doubted: _Asked | None = None  # has waited for too long by the clock
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has no such base class

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        waiting = self._waiting
        while (reply := self._reader.gets()) is not False:
            if waiting[0].replied(reply):
                waiting.popleft()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.listen()
        self._fail(RedisConnectionError, f"connection lost: {exc or 'closed by server'}")

    def ask(self, command: Command) -> asyncio.Future[Any]:
        """Send a command soon; the future brings its reply. Raises redis.exceptions.ConnectionError."""
        return self._ask((command,), 0)

    def ask_all(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Send commands together; the future brings their replies, some of which may be errors."""
        return self._ask(commands, len(commands))

    def _ask(self, commands: Sequence[Command], num_commands: int) -> asyncio.Future[Any]:
        if self.lost:
            raise RedisConnectionError("connection lost")
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        future = self._loop.create_future()
        self._waiting.append(_Asked(future, num_commands, self._loop.time()))
        if self._timer is None and self._timeout_s is not None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)
        return future

    def rest(self, patience_s: float) -> None:
        """Leave replies unread for so long after each write; 0 = read them as they come."""
        self._patience_s = patience_s
        if not patience_s:
            self.listen()

    def listen(self) -> None:
        """Read the replies that have come."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def close(self) -> None:
        self.lost = True
        self.listen()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._transport is not None and not self.lost:
            self._transport.write(b"".join(out))
            if self._patience_s and self._resting is None:
                self._transport.pause_reading()
                self._resting = self._loop.call_later(self._patience_s, self.listen)

    def _look(self) -> None:
        """Give the connection up when the oldest call has waited for too long.

        A process that was itself frozen finds the timer before it has read what came meanwhile, or has sent what it was
        about to: so the call is looked at twice.
        """
        self._timer = None
        if not self._waiting or self._timeout_s is None:
            return
        oldest = self._waiting[0]
        left_s = oldest.asked_s + self._timeout_s - self._loop.time()
        if left_s <= 0 and self._doubted is not oldest:
            self._doubted, left_s = oldest, _SECOND_LOOK_S
            self.listen()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self.lost = True
        if self._transport is not None:
            self._transport.abort()  # to close it would wait for a peer that takes nothing
        self._fail(RedisTimeoutError, f"no reply within {self._timeout_s} s")

    def _fail(self, kind: type[RedisError], text: str) -> None:
        for asked in self._waiting:
            if not asked.future.done():
                asked.future.set_exception(kind(text))
        self._waiting.clear()


class RespConnection:
    """A connection that is opened with the first call and again after it was lost."""

    def __init__(self, url: str, *, timeout_s: float | None = None) -> None:
        """`timeout_s`: how long a reply may take before the connection counts as lost; None = for ever, to block."""
        self._options = parse_url(url)
        self._timeout_s = timeout_s
        self._patience_s = 0.0
        self._protocol: _Protocol | None = None
        self._opening = asyncio.Lock()
        self.num_opened = 0
        """How often it was opened. Another number than before: Redis may have begun another life since."""

    async def call(self, *command: Argument) -> Any:
        """Return the reply to one command. Raises redis.exceptions.RedisError."""
        protocol = self._protocol
        if protocol is None or protocol.lost:
            protocol = await self._open()
        return await protocol.ask(command)

    async def call_all(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to all commands, sent in one write; a reply may be a ResponseError.

        Raises redis.exceptions.RedisError.
        """
        if not commands:
            return []
        protocol = self._protocol
        if protocol is None or protocol.lost:
            protocol = await self._open()
        replies: list[Any] = await protocol.ask_all(commands)
        for reply in replies:
            if isinstance(reply, Unwilling):
                raise reply
        return replies

    def register_script(self, text: str) -> "Script":
        """Return a script that runs over this connection, called as redis-py's are."""
        return Script(self, text)

    def rest(self, patience_s: float) -> None:
        """Leave replies unread for up to `patience_s` after each write, so that they wake nobody; 0 = read them."""
        self._patience_s = patience_s
        if self._protocol is not None:
            self._protocol.rest(patience_s)

    def listen(self) -> None:
        """Read what has been answered by now."""
        if self._protocol is not None:
            self._protocol.listen()

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None

    async def _open(self) -> _Protocol:
        if self._protocol is not None and not self._protocol.lost:
            return self._protocol
        async with self._opening:
            if self._protocol is None or self._protocol.lost:
                self._protocol = await self._connect()
                self.num_opened += 1
            return self._protocol

    def _made(self) -> _Protocol:
        return _Protocol(self._timeout_s)

    async def _connect(self) -> _Protocol:
        options = self._options
        loop = asyncio.get_running_loop()
        protocol: _Protocol | None = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                if "path" in options:
                    _, protocol = await loop.create_unix_connection(self._made, options["path"])
                else:
                    context = ssl.create_default_context() if "connection_class" in options else None
                    host, port = options.get("host", "localhost"), options.get("port", 6379)
                    _, protocol = await loop.create_connection(self._made, host, port, ssl=context)
                if options.get("password"):
                    user = [options["username"]] if options.get("username") else []
                    await protocol.ask(("AUTH", *user, options["password"]))
                if options.get("db"):
                    await protocol.ask(("SELECT", options["db"]))
        except BaseException as error:
            if protocol is not None:
                protocol.close()
            if isinstance(error, OSError):  # TimeoutError is one
                raise RedisConnectionError(f"cannot connect to Redis: {error}") from error
            raise
        protocol.rest(self._patience_s)
        return protocol


class Script:
    """A Lua script called by its hash, loaded when Redis does not have it."""

    def __init__(self, connection: RespConnection, text: str) -> None:
        self._connection = connection
        self._text = text
        self._sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Return what the script returns for these keys and arguments."""
        try:
            return await self._connection.call("EVALSHA", self._sha, len(keys), *keys, *args)
        except NoScriptError:
            return await self._connection.call("EVAL", self._text, len(keys), *keys, *args)

    async def call_all(self, calls: Sequence[ScriptCall], *, beside: Sequence[Command] = ()) -> list[Any]:
        """Return what the script returns for each call, and then the replies to the commands `beside`: one write.

        Any of them may be a ResponseError. Raises redis.exceptions.RedisError.
        """
        commands: list[Command] = [("EVALSHA", self._sha, len(keys), *keys, *args) for keys, args in calls]
        replies = await self._connection.call_all([*commands, *beside])
        unknown = [i for i in range(len(calls)) if isinstance(replies[i], NoScriptError)]
        if unknown:
            commands = [("EVAL", self._text, len(calls[i][0]), *calls[i][0], *calls[i][1]) for i in unknown]
            for i, reply in zip(unknown, await self._connection.call_all(commands), strict=True):
                replies[i] = reply
        return replies


def _error(message: str) -> ResponseError | Unwilling:
    code = message.partition(" ")[0]
    if code == "NOSCRIPT":
        return NoScriptError(message)
    return Unwilling(message) if code in _UNWILLING else ResponseError(message)
