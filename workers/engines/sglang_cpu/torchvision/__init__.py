"""Stands in for torchvision, which SGLang imports and text models never call.

Every submodule can be imported and every name in it taken; using one raises.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """The names that image processors read at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Missing:
    """A function or constant that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "_Missing":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name}: torchvision is not installed, this worker serves text only")


def _missing_class(module: str, name: str) -> type:
    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{module}.{name}: torchvision is not installed, this worker serves text only")

    return type(name, (), {"__module__": module, "__init__": refuse})


def _attributes_of(module: str) -> Callable[[str], Any]:
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return InterpolationMode
        full = f"{module}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        # Subclassed and used in annotations at import, hence a real class.
        return _missing_class(module, name) if name[0].isupper() else _Missing(full)

    return attribute


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module for every `torchvision.…`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _attributes_of(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


sys.meta_path.append(_Finder())
__getattr__ = _attributes_of(__name__)
