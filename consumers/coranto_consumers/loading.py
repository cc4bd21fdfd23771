"""Loading of what users name as `module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from coranto.errors import InvalidInput


def load_target(target: str) -> Any:
    """Return the object `module:name`. A class or a function without arguments is called, and its result returned.

    Raises InvalidInput if there is no such object.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise InvalidInput(f"{target!r} is not of the form module:App", field="application")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidInput(f"module {module_name} cannot be imported: {error}", field="application") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidInput(f"module {module_name} has no {name}", field="application")
        found = getattr(found, part)
    return found() if callable(found) else found
