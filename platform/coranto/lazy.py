"""Lazy imports: names of a package that are imported at their first use, because importing them is slow."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from coranto.extras import with_install_advice


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package. `homes` maps names to the modules that define them."""

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            raise with_install_advice(error) from error

    return get
