"""Loading of objects that users name as `module:name`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from coranto.errors import InvalidInput


def load_target(target: str, **arguments: Any) -> Any:
    """Return the object `module:name`. A class or a function is called with the arguments, and its result returned.

    Raises InvalidInput if the object does not exist or does not accept the arguments.
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
    if not callable(found):
        if arguments:
            raise InvalidInput(f"{target} is not a function, but arguments are given", field="application")
        return found
    try:
        inspect.signature(found).bind(**arguments)
    except ValueError:  # Some built-ins have no signature.
        return found(**arguments)
    except TypeError as error:
        raise InvalidInput(f"{target} cannot be called with these arguments: {error}", field="application") from error
    return found(**arguments)
