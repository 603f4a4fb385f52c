"""`pdgate doctor`: what this machine can run, and whether a stack runs on it."""

import contextlib
import ctypes
from collections.abc import Callable, Sequence

import httpx
import msgspec
import typer

from contracts.catalog import CatalogError, read_catalog
from pdgate import preflight
from pdgate.connection import data_folder, gateway_url
from pdgate.engine import engine_ready
from pdgate.layout import Layout, catalog_file, layout_of
from pdgate.libibverbs import LIBRARY, find_library
from pdgate.models import model_ready
from pdgate.output import AsJson, show
from pdgate.preflight import CannotStart
from pdgate.services import ServiceError, postgres_binaries, valkey_binary


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `ok` False = `pdgate up` would not work as it is."""

    check: str
    ok: bool
    found: str


def doctor(as_json: AsJson = False) -> None:
    """Check this machine; exit 1 when something is missing that `pdgate up` needs."""
    checks = examine(layout_of(data_folder()))
    show(checks, as_json=as_json)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def examine(layout: Layout) -> Sequence[Check]:
    """Return every finding."""
    obstacle = preflight.real_engine_obstacle()
    engine = str(layout.engine) if engine_ready(layout.engine) else "not installed yet"
    return [
        Check(check="real engine", ok=True, found=f"no: {obstacle}; the timed engine runs" if obstacle else "can run"),
        _attempt("disk", lambda: _disk(layout)),
        _attempt("Valkey", lambda: str(valkey_binary())),
        _attempt("PostgreSQL", lambda: str(postgres_binaries())),
        Check(check="libibverbs", ok=True, found=_library(layout)),
        Check(check="engine", ok=True, found=engine),
        _attempt("catalogue", lambda: _catalogue(layout)),
        Check(check="gateway", ok=True, found=_gateway()),
    ]


def _attempt(name: str, find: Callable[[], str]) -> Check:
    try:
        return Check(check=name, ok=True, found=find())
    except (CannotStart, ServiceError, CatalogError) as error:
        return Check(check=name, ok=False, found=str(error))


def _disk(layout: Layout) -> str:
    preflight.check_disk(layout.data, preflight.DATA_DISK_BYTES, "the data folder")
    if not engine_ready(layout.engine):
        preflight.check_disk(layout.engine.parent, preflight.ENGINE_DISK_BYTES, "the engine")
    return "enough room"


def _library(layout: Layout) -> str:
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return "on this machine"
    found = find_library(layout.libraries)
    return str(found) if found else "missing; `pdgate up` fetches it where apt-get is there"


def _catalogue(layout: Layout) -> str:
    file = catalog_file()
    models = read_catalog(file).models
    ready = sum(model_ready(layout.models / model.tokenizer) for model in models.values())
    return f"{file}: {len(models)} model(s), {ready} prepared"


def _gateway() -> str:
    try:
        url = gateway_url()
    except CannotStart:
        return "no stack has run here"
    try:
        answer = httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False)
    except httpx.TransportError:
        return f"{url} does not answer"
    return f"{url} is ready" if answer.status_code == httpx.codes.OK else f"{url} answers and is not ready"
