"""The archive of classes that halves the processor time of starting local sessions.

Java can map the classes that Spark's driver loads from a file (class data sharing). `new_session` uses it if it is
there; `tools/class_archive.py` makes it. Java ignores an unsuitable file, but crashes over one that was cut off, so the
name tells the size.
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
"""Otherwise Java would print a warning about an archive that does not suit it."""


def find_archive() -> Path | None:
    """Return the path of the archive for this Java and PySpark. None if there is none, or it is not whole."""
    folder, name = archive_place() or (None, "")
    if folder is None:
        return None
    for path in folder.glob(f"{name}-*.jsa"):
        with suppress(OSError):
            if path.stem == f"{name}-{path.stat().st_size}":
                return path
    return None


def archive_place() -> tuple[Path, str] | None:
    """Return the folder of archives, in `~/.cache` (or `$XDG_CACHE_HOME`), and how this one's name begins."""
    java, spark = find_java(), find_spec("pyspark")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    except RuntimeError:
        return None
    if java is None or spark is None or spark.origin is None:
        return None
    try:
        release = version("pyspark")
    except PackageNotFoundError:  # It is not installed but on the path, as the archive of a cluster.
        return None
    facts = [java.resolve(), java.stat().st_mtime_ns, spark.origin, release]
    digest = hashlib.sha256(repr([str(fact) for fact in facts]).encode()).hexdigest()[:16]
    return cache / "coranto", f"spark-{release}-{digest}"


def archive_options() -> str:
    """Return the options of Java to use the archive; none if there is no archive."""
    path = find_archive()
    return f'"-XX:SharedArchiveFile={path}" {SILENT}' if path is not None else ""


def find_java() -> Path | None:
    """Return the path of the `java` that Spark runs on; None if there is none."""
    java = java_program()
    return java if java is not None and java.exists() else None
