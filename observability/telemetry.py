"""Log lines and the metrics endpoint of one process. Called once, from a process's `main`."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from typing import Any, Final

import msgspec
import structlog
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, ProcessCollector, start_http_server
from prometheus_client.exposition import choose_encoder

from observability.metrics import Instruments

_encoder: Final = msgspec.json.Encoder(enc_hook=repr)


class Telemetry:
    """The instruments of one process and the text they are scraped as."""

    def __init__(self) -> None:
        self.instruments = Instruments()
        self._registry = self.instruments.registry
        for collector in (ProcessCollector(registry=None), GC_COLLECTOR, PLATFORM_COLLECTOR):
            self._registry.register(collector)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and their media type: OpenMetrics with exemplars for who asks for it."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    @contextmanager
    def serve(self, host: str, port: int) -> Iterator[None]:
        """Serve the exposition over HTTP while the block runs; port 0 = do not serve."""
        if port == 0:
            yield
            return
        server, thread = start_http_server(port, addr=host, registry=self._registry)
        try:
            yield
        finally:
            server.shutdown()
            thread.join(timeout=2)


def configure_logging(service: str, *, level: str = "INFO", json: bool = True) -> None:
    """Make structlog write one line per event to stderr; JSON for machines, plain for a terminal."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(_line) if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format=f"%(levelname)s {service} %(name)s %(message)s"
    )


def _line(event: Mapping[str, Any], **fallback: Any) -> str:
    """Return an event as JSON. A gateway writes a line for each request, and `json` takes four times as long."""
    try:
        return _encoder.encode(event).decode()
    except (ValueError, TypeError, OverflowError):  # half a surrogate pair, or a number of more than 64 bits
        return dumps(event, **fallback)
