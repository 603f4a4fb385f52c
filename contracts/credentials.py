"""Who may call: the token that our processes show each other over gRPC, and certificates where they are wanted.

A caller sends the token with every call; a server that has one answers UNAUTHENTICATED to whoever does not. The token
keeps out who can reach a port, not who can listen on the wire: for that there are certificates, which both sides show.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import msgspec
import structlog

from contracts.environment import Secret, SettingsError

log: Final = structlog.get_logger()

HEALTH: Final = "/grpc.health.v1.Health/"
_MOST_PEERS_TOLD: Final = 1024

Options = Sequence[tuple[str, Any]]


class Certificates(msgspec.Struct, frozen=True, kw_only=True):
    """What a process shows and whom it believes, PEM. It is server and client with the same certificate."""

    ca: bytes
    cert: bytes
    key: bytes
    name: str = ""
    """Name that the certificates of our servers carry; empty = the host of the address that is called."""


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without one of the tokens; says so in the log once per host."""

    def __init__(self, tokens: Sequence[str], *, what: str, open_to_all: Sequence[str] = ()) -> None:
        """`what`: the token's name in answers and log lines; `open_to_all`: beginnings of methods that need none."""
        self._expected = [f"Bearer {token}".encode() for token in tokens]
        self._what = what
        self._open = tuple(open_to_all)
        self._told: set[str] = set()

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        """Let a call through when its token is right."""
        method = str(details.method)
        if self._open and method.startswith(self._open):
            return await continuation(details)
        given = dict(details.invocation_metadata).get("authorization", "")
        shown = str(given).encode()
        # All are compared, so that the time tells nothing of which one it was.
        if sum(hmac.compare_digest(shown, expected) for expected in self._expected):
            return await continuation(details)
        return self._refusal(method, "wrong" if given else "missing")

    def _refusal(self, method: str, how: str) -> Any:
        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._tell(str(context.peer()), method, how)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the {self._what} is missing or wrong")

        # A stream in both directions ends at once whatever the caller's side is.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _tell(self, peer: str, method: str, how: str) -> None:
        host = peer.rpartition(":")[0] or peer
        if host in self._told or len(self._told) >= _MOST_PEERS_TOLD:
            return
        self._told.add(host)
        log.warning("peer_refused", peer=host, method=method, why=f"the {self._what} is {how}")


class Credentials:
    """What one process shows to others and asks of them. Without a token and certificates: nothing."""

    def __init__(
        self,
        *,
        token: str = "",
        certificates: Certificates | None = None,
        what: str = "peer token",
        open_health: bool = False,
    ) -> None:
        """`token` may be several, separated by commas: the first is shown, each is accepted.

        Args:
            token: printable ASCII, or empty.
            certificates: for TLS in both directions.
            what: the token's name in answers and log lines.
            open_health: as a server, answer calls of the health service to everybody.
        """
        self._tokens = [part for part in token.split(",") if part]
        self._certificates = certificates
        self._what = what
        self._open = (HEALTH,) if open_health else ()

    @property
    def asks(self) -> bool:
        """Whether a server with these refuses anybody."""
        return bool(self._tokens or self._certificates)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        return (("authorization", f"Bearer {self._tokens[0]}"),) if self._tokens else ()

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """Return a channel to `host:port`; each call on it needs `metadata`."""
        theirs = self._certificates
        if theirs is None:
            return grpc.aio.insecure_channel(address, options=options)
        shown = grpc.ssl_channel_credentials(theirs.ca, theirs.key, theirs.cert)
        if theirs.name:
            options = [*options, ("grpc.ssl_target_name_override", theirs.name)]
        return grpc.aio.secure_channel(address, shown, options=options)

    def server(self, options: Options = ()) -> grpc.aio.Server:
        """Return a server that checks the token of each call."""
        checks = (TokenCheck(self._tokens, what=self._what, open_to_all=self._open),) if self._tokens else ()
        return grpc.aio.server(interceptors=checks, options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Bind a server to `host:port` and return the port. Raises OSError (or RuntimeError) when it is taken."""
        ours = self._certificates
        if ours is None:
            port = server.add_insecure_port(address)
        else:
            shown = grpc.ssl_server_credentials([(ours.key, ours.cert)], ours.ca, require_client_auth=True)
            port = server.add_secure_port(address, shown)
        if port == 0:
            raise OSError(f"cannot listen on {address}: the port is taken or not allowed")
        return int(port)


NOBODY_ASKED: Final = Credentials()
"""No token, no certificates: for what listens on loopback only."""


def certificates_of(prefix: str, *, ca: str, cert: str, key: str, name: str) -> Certificates | None:
    """Return what the files `{prefix}TLS_CA`, `_CERT` and `_KEY` hold; None when none of them is named.

    Raises:
        SettingsError: some are named and others not, or one cannot be read.
    """
    named = {"TLS_CA": ca, "TLS_CERT": cert, "TLS_KEY": key}
    if not any(named.values()):
        if name:
            raise SettingsError(f"{prefix}TLS_NAME: means nothing without {prefix}TLS_CA, _CERT and _KEY")
        return None
    held = {}
    for variable, file in named.items():
        if not file:
            raise SettingsError(f"{prefix}{variable}: must be set too: TLS needs the CA, a certificate and its key")
        try:
            held[variable] = Path(file).read_bytes()
        except OSError as error:
            raise SettingsError(f"{prefix}{variable}: {error}") from None
        if b"-----BEGIN " not in held[variable]:
            raise SettingsError(f"{prefix}{variable}: {file} holds no PEM")
    return Certificates(ca=held["TLS_CA"], cert=held["TLS_CERT"], key=held["TLS_KEY"], name=name)


class PeerSettings(Protocol):
    """The part of a process's settings that is about other processes."""

    @property
    def peer_token(self) -> Secret:
        """Shared by gateways, schedulers and workers; several by commas; empty = none."""

    @property
    def tls_ca(self) -> str:
        """PEM file of who signs our certificates."""

    @property
    def tls_cert(self) -> str:
        """PEM file of this process's certificate."""

    @property
    def tls_key(self) -> str:
        """PEM file of its key."""

    @property
    def tls_name(self) -> str:
        """Name in the certificates of servers, instead of their host."""


def credentials_of(
    prefix: str, settings: PeerSettings, *, listen: str = "127.0.0.1:0", open_health: bool = False
) -> Credentials:
    """Return what the settings of a process say.

    Args:
        prefix: of its variables, as in `WORKER_`.
        settings: its settings.
        listen: where it serves gRPC, if it does.
        open_health: as in `Credentials`.

    Raises:
        SettingsError: files are missing or bad, or others could reach `listen` without being asked for anything.
    """
    token = checked_token(f"{prefix}PEER_TOKEN", settings.peer_token)
    certificates = certificates_of(
        prefix, ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key, name=settings.tls_name
    )
    found = Credentials(token=token, certificates=certificates, open_health=open_health)
    if not found.asks and not is_loopback(listen):
        raise SettingsError(
            f"{prefix}PEER_TOKEN: must be set where {listen} can be reached from other machines: "
            "without it anybody there could submit work"
        )
    return found


def checked_token(variable: str, token: Secret) -> Secret:
    """Return a token that can be sent. Raises SettingsError, which does not say what it was."""
    if any(not "!" <= letter <= "~" for letter in token):
        raise SettingsError(f"{variable}: may hold printable ASCII without spaces only")
    if any(part and len(part) < 16 for part in token.split(",")):
        raise SettingsError(f"{variable}: a token of fewer than 16 characters can be guessed")
    return token


def is_loopback(listen: str) -> bool:
    """Return whether only this machine can reach `host:port`."""
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost" or listen.startswith("unix:"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
