"""The machine's Java, for Spark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def java_program() -> Path | None:
    """Return the path of `java`: below `JAVA_HOME` or, if that is not set, the first one on the PATH; otherwise None.

    The path below `JAVA_HOME` may not exist.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        return Path(home, "bin", "java")
    found = shutil.which("java")
    return None if found is None else Path(found)
