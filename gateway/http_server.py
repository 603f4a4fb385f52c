"""granian as the gateway runs it: what a client may cost before a request is whole."""

from typing import Any, Final

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from gateway.settings import Settings

_BACKLOG: Final = 1024
_BACKPRESSURE: Final = 16_384


def http_server(app: Any, settings: Settings) -> Server:
    """Return a server for the application, on this process's loop. Raises SettingsError."""
    host, port = settings.address
    return Server(
        app,
        address=host,
        port=port,
        interface=Interfaces.ASGINL,
        # Where HTTP/2 is possible too, a connection that says nothing is waited for without end.
        http=HTTPModes.http1,
        websockets=False,
        log_enabled=False,
        backlog=_BACKLOG,
        backpressure=_BACKPRESSURE,
        http1_settings=HTTP1Settings(header_read_timeout=int(settings.head_timeout_s * 1000)),
    )
