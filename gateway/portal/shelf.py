"""Scripts and styles: read once, named by their content, compressed, and kept by browsers for good."""

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import NotFound

STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_GOOD: Final = "public, max-age=31536000, immutable"


class Asset(msgspec.Struct, frozen=True):
    """One file as it is sent."""

    body: bytes
    packed: bytes
    media_type: str
    tag: str


class Shelf:
    """Every file under `static` at the start of the process; there are no others to ask for."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._assets: Mapping[str, Asset] = {
            str(file.relative_to(folder)): _asset(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.suffix in _TYPES
        }

    def address(self, name: str) -> str:
        """Return where a page finds a file; empty when it is not there, as libraries are without npm."""
        found = self._assets.get(name)
        return f"/portal/static/{name}?v={found.tag}" if found else ""

    def find(self, name: str) -> Asset:
        """Return a file. Raises NotFound."""
        found = self._assets.get(name)
        if found is None:
            raise NotFound("There is no such file.")
        return found

    @property
    def packed_bytes(self) -> int:
        """Return what all files weigh over the wire."""
        return sum(len(one.packed) for one in self._assets.values())


def shelf_routes(shelf: Shelf) -> list[HTTPRouteHandler]:
    """Return the handler of files; they are the same for everybody, so nobody has to be signed in."""

    @get("/portal/static/{name:path}")
    async def get_asset(request: Request, name: FromPath[str]) -> Response[bytes]:  # type: ignore[type-arg]
        """Return a script or a style."""
        asset = shelf.find(name.lstrip("/"))
        fresh = request.query_params.get("v") == asset.tag
        headers = {"cache-control": _FOR_GOOD if fresh else "no-cache", "vary": "accept-encoding"}
        packed = "gzip" in request.headers.get("accept-encoding", "")
        if packed:
            headers["content-encoding"] = "gzip"
        return Response(asset.packed if packed else asset.body, media_type=asset.media_type, headers=headers)

    return [get_asset]


def _asset(file: Path) -> Asset:
    body = file.read_bytes()
    return Asset(body, gzip.compress(body, 9, mtime=0), _TYPES[file.suffix], hashlib.sha256(body).hexdigest()[:12])
