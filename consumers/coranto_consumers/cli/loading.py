"""Loading of applications by name, and the default prefixes of their shards in etcd."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from coranto.errors import InvalidInput
from coranto_consumers.runtime.application import Application

CONSUMERS_PREFIX = "/gazette/consumers/"
"""The beginning of all default key prefixes of consumers."""


def load_application(target: str) -> Application[Any]:
    """Load the application `module:name`: an instance, or a class or function that returns one without arguments.

    Modules of the current folder are found too. Raises InvalidInput.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise InvalidInput(f"{target!r} is not of the form module:App", field="application")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidInput(f"module {module_name} cannot be imported: {error}", field="application") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidInput(f"module {module_name} has no {name}", field="application")
        found = getattr(found, part)
    made = found if isinstance(found, Application) or not callable(found) else found()
    if not isinstance(made, Application):
        raise InvalidInput(f"{target} is no Application, and makes none", field="application")
    return made


def default_prefix(target: str) -> str:
    """Return the default key prefix of an application's shards in etcd."""
    return CONSUMERS_PREFIX + target.replace(":", ".")
