"""Ways to run the engine on accelerators: `workers/profiles/*.toml`, chosen by `WORKER_PROFILE`.

A profile has a table of arguments of `sglang.Engine` for all roles (`common`) and one for each role it serves
(`prefill`, `decode`, `unified`), and environment variables. What a worker sets itself wins over none of them:
`WORKER_ENGINE_OPTIONS` comes last.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from contracts.lifecycle import Role

FOLDER: Final = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A profile cannot be used; the message names it and says why."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run the engine."""

    summary: str
    hardware: str
    common: Mapping[str, Any] = {}
    prefill: Mapping[str, Any] | None = None
    decode: Mapping[str, Any] | None = None
    unified: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = {}

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that it serves."""
        return tuple(role for role in Role if getattr(self, role.value) is not None)

    def arguments(self, role: Role) -> Mapping[str, Any]:
        """Return the engine's arguments for a role. Raises ProfileError when it serves another one."""
        own: Mapping[str, Any] | None = getattr(self, role.value)
        if own is None:
            raise ProfileError(f"it has no table [{role}]; it serves {', '.join(self.roles)}")
        return {**self.common, **own}


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with the project."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.toml")))


def read_profile(name: str) -> Profile:
    """Return the profile of that name, or in the file of that name.

    Raises:
        ProfileError: there is none, or it is not as described above.
    """
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), Profile)
    except FileNotFoundError:
        raise ProfileError(f"there is no profile {name!r}; there are {', '.join(profile_names())}") from None
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ProfileError(f"{file}: {error}") from None
