"""Settings from the environment: one frozen Struct per process, decoded once, strict."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

RedisUrl = Annotated[str, msgspec.Meta(pattern=r"^(redis|rediss|unix)://.")]


class SettingsError(SystemExit):
    """Stops the process with one line that names the variable."""


class Secret(str):
    """A string whose repr hides it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "***"


def from_env(kind: type[S], prefix: str, environ: Mapping[str, str]) -> S:
    """Return `kind` filled from the variables that start with `prefix`.

    A field `redis_url` is read from `{prefix}REDIS_URL`. A field that is a tuple of strings takes a
    comma-separated list.

    Raises:
        SettingsError: an unknown variable with the prefix, a missing one, or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {prefix + name.upper(): name for name in kind.__struct_fields__}
    values: dict[str, Any] = {}
    for variable, raw in environ.items():
        if not variable.startswith(prefix):
            continue
        if variable not in known:
            raise SettingsError(f"{variable}: no such setting; known are {', '.join(sorted(known))}")
        name = known[variable]
        value: Any = [part for part in raw.split(",") if part] if _is_tuple(hints[name]) else raw
        try:
            values[name] = msgspec.convert(value, hints[name], strict=False, dec_hook=_convert)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{variable}: {error}") from None
    try:
        return kind(**values)
    except TypeError as error:
        missing = [v for v, n in known.items() if n not in values and f"'{n}'" in str(error)]
        raise SettingsError(f"{', '.join(missing) or prefix}: must be set ({error})") from None


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _convert(kind: type, value: Any) -> Any:
    if kind is Secret:
        return Secret(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no decoder for {kind}")


def host_and_port(variable: str, listen: str) -> tuple[str, int]:
    """Return the parts of `host:port`; an empty host is this machine's loopback. Raises SettingsError."""
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(f"{variable}: {listen!r} is not host:port")
    return host.strip("[]") or "127.0.0.1", int(port)


def metrics_address(variable: str, listen: str) -> tuple[str, int]:
    """Return where metrics are served: port 0 = nowhere, when `listen` is empty. Raises SettingsError."""
    return host_and_port(variable, listen) if listen else ("", 0)


def asyncpg_url(url: str) -> str:
    """Return a `postgresql://` URL in the form SQLAlchemy wants for asyncpg."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("postgresql", "postgres", "postgresql+asyncpg"):
        raise SettingsError(f"DATABASE_URL must start with postgresql://, not {scheme}://")
    return f"postgresql+asyncpg://{rest}"
