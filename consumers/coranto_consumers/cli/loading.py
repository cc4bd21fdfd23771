"""Loading of applications by name, and the default prefixes of their shards in etcd."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from coranto.errors import InvalidInput
from coranto_consumers.loading import load_target
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.discovery import CONSUMERS_PREFIX


def load_application(target: str) -> Application[Any]:
    """Load the application `module:name`: an instance, or a class or function that returns one without arguments.

    Modules of the current folder are found too. Raises InvalidInput.
    """
    made = load_here(target)
    if not isinstance(made, Application):
        raise InvalidInput(
            f"{target} is not an Application, and does not make one; "
            "name a subclass or an instance of coranto_consumers.runtime.application.Application",
            field="application",
        )
    return made


def load_here(target: str) -> Any:
    """Return the object `module:name`. A class or a function is called, and its result returned.

    Modules of the current folder are found too. Raises InvalidInput.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return load_target(target)


def default_prefix(target: str) -> str:
    """Return the default key prefix of an application's shards in etcd."""
    return CONSUMERS_PREFIX + target.replace(":", ".")
