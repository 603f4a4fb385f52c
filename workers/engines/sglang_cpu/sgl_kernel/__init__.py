"""Stands in for SGLang's compiled kernels: it registers no op, so SGLang takes its native paths."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs an accelerator")

    return missing
