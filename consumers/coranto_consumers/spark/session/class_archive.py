"""The class archive, which halves the CPU time of starting local sessions.

With class data sharing, Java maps the classes that Spark's driver loads from a file. `new_session` uses the file if it
exists; `tools/class_archive.py` creates it. Java ignores an unsuitable file, but crashes with a truncated one, so the
file's name contains its size.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from coranto.process.java import java_program

SILENT: Final = "-Xlog:disable -Xlog:all=error:stderr"
"""Suppresses Java's warning about an unsuitable archive."""


def find_archive() -> Path | None:
    """Return the path of the archive for this Java and PySpark. None if it does not exist, or is truncated."""
    folder, name = archive_location() or (None, "")
    if folder is None:
        return None
    for path in folder.glob(f"{name}-*.jsa"):
        with suppress(OSError):
            if path.stem == f"{name}-{path.stat().st_size}":
                return path
    return None


def archive_location() -> tuple[Path, str] | None:
    """Return the folder of archives, in `~/.cache` (or `$XDG_CACHE_HOME`), and the prefix of the archive's name."""
    java, spark = find_java(), find_spec("pyspark")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    except RuntimeError:
        return None
    if java is None or spark is None or spark.origin is None:
        return None
    try:
        release = version("pyspark")
    except PackageNotFoundError:  # PySpark is not installed, but on the path, as in a cluster's archive.
        return None
    facts = [java.resolve(), java.stat().st_mtime_ns, spark.origin, release]
    digest = hashlib.sha256(repr([str(fact) for fact in facts]).encode()).hexdigest()[:16]
    return cache / "coranto", f"spark-{release}-{digest}"


def archive_options() -> str:
    """Return Java's options to use the archive. Empty without an archive."""
    path = find_archive()
    return f'"-XX:SharedArchiveFile={path}" {SILENT}' if path is not None else ""


def find_java() -> Path | None:
    """Return the path of the `java` that Spark runs on. None if there is no Java."""
    java = java_program()
    return java if java is not None and java.exists() else None
