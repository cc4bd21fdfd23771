"""The machine's Java, for Spark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def java_program() -> Path | None:
    """Return the path of `java`: that below `JAVA_HOME` or, if it is not set, the first one on the PATH.

    None if neither is there. Whether the path below `JAVA_HOME` has a program was not checked.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        return Path(home, "bin", "java")
    found = shutil.which("java")
    return None if found is None else Path(found)
