"""The archive of classes from which Java starts local sessions in half the processor time.

Spark's driver loads some ten thousand classes from two hundred archives, and checks each of them, before it runs a
first job. Java can keep loaded and checked classes in a file, and map that into memory at the next start (class data
sharing). `new_session` uses the file if it is there. Make it once for each machine and version of Java and PySpark:

    python -m coranto_consumers.spark.class_archive

It takes half a minute, and 160 MB in `~/.cache/coranto` (or `$XDG_CACHE_HOME/coranto`). Java itself finds out if a file
does not suit it, and then starts without. But it crashes over a file that was cut off, so the name tells the size.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from coranto.errors import CorantoError, Unavailable
from coranto.process.java import java_program

_SILENT: Final = "-Xlog:disable -Xlog:all=error:stderr"
"""Otherwise Java would print a warning about an archive that does not suit it."""
_PATIENCE: Final = 600.0


def find_archive() -> Path | None:
    """Return the path of the archive for this Java and PySpark. None if there is none, or it is not whole."""
    folder, name = _place() or (None, "")
    if folder is None:
        return None
    for path in folder.glob(f"{name}-*.jsa"):
        with suppress(OSError):
            if path.stem == f"{name}-{path.stat().st_size}":
                return path
    return None


def _place() -> tuple[Path, str] | None:
    """Return the folder of archives, and the beginning of this one's name. None without Java, or without a home."""
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
    return f'"-XX:SharedArchiveFile={path}" {_SILENT}' if path is not None else ""


def find_java() -> Path | None:
    """Return the path of the `java` that Spark runs on; None if there is none."""
    java = java_program()
    return java if java is not None and java.exists() else None


def make_archive() -> Path:
    """Make the archive, by a session that does once what consumers do, and return its path.

    Raises Unavailable if that fails, and OSError if it cannot be written.
    """
    place = _place()
    if place is None:
        raise Unavailable("there is no Java here, or no home: install Java 17 or later, or set JAVA_HOME and HOME")
    folder, name = place
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as making:
        made = Path(making) / "archive"
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--into", str(made)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        if done.returncode or not made.is_file():
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise Unavailable(
                f"Java made no archive of classes; sessions start without it. It says: {said[0]} … {said[-1]}"
            )
        with made.open("rb") as file:
            os.fsync(file.fileno())
        return made.replace(folder / f"{name}-{made.stat().st_size}.jsa")


def _run_session(into: Path) -> None:
    """Run a session whose Java writes the archive when it ends, and wait for that."""
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import functions as F

    from coranto_consumers.spark.session import new_session
    from coranto_consumers.spark.source import register

    option = {"spark.driver.defaultJavaOptions": f'"-XX:ArchiveClassesAtExit={into}" {_SILENT}'}
    spark = new_session("class-archive", settings=option, short=True)
    register(spark)
    rows = spark.range(0, 2000, 1, 2).selectExpr("id", "CAST(id % 7 AS STRING) AS k", "'{}' AS line")
    read = rows.mapInArrow(_unchanged, rows.schema).persist()
    assert len(read.where("k = '3'").select("line").collect()) > 1
    limits = spark.createDataFrame(pa.table({"k": ["1"], "low": [3]}))
    chosen = read.join(F.broadcast(limits), "k", "left").where(F.col("low").isNull() | (F.col("id") > F.col("low")))
    parsed = chosen.persist()
    parsed.agg(F.count("k"), F.min(F.when(F.col("id") > 3, F.struct("k", "id")))).collect()
    totals = parsed.groupBy("k").agg(
        F.count(F.lit(1)).alias("count"),
        F.sum("id").alias("sum"),
        F.max("id").alias("max"),
        F.coalesce(F.count_if(F.col("id").isNull()), F.lit(0)).alias("none"),
    )
    totals.mapInArrow(_unchanged, totals.schema).collect()
    told = parsed.where("id > 5").select(F.col("k").cast("binary"), F.to_json(F.struct("id", "k")).alias("value"))
    told.mapInArrow(_unchanged, told.schema).collect()
    spark.createDataFrame(pa.table({"id": [1]})).coalesce(1).unionByName(spark.range(1)).count()
    spark.stop()
    java: Any = SparkContext._gateway.proc  # type: ignore[union-attr]
    SparkContext._gateway.shutdown()  # type: ignore[union-attr]
    java.stdin.close()
    java.wait(_PATIENCE)


def _unchanged(batches: Any) -> Any:
    return batches


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into is not None:
        _run_session(arguments.into)
        return 0
    if find_archive() is not None:
        return 0
    sys.stdout.write("Making an archive of Spark's classes, from which sessions start in half the time …\n")
    sys.stdout.flush()
    try:
        make_archive()
    except (CorantoError, OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
