"""Create an archive of Java classes, which halves the processor time that starting a Spark session takes.

    python tools/class_archive.py

Run it once for each machine and version of Java and PySpark, in an environment that has `coranto[spark]`. It takes
half a minute, and 160 MB in `~/.cache/coranto` (or `$XDG_CACHE_HOME/coranto`). `new_session` uses the archive if it
exists.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from coranto.errors import CorantoError, Unavailable
from coranto_consumers.spark.session.class_archive import SILENT, archive_location, find_archive

_TIMEOUT: Final = 600.0


def make_archive() -> Path:
    """Create the archive from a session that runs the operations of consumers once, and return its path.

    Raises Unavailable if that fails, and OSError if it cannot be written.
    """
    location = archive_location()
    if location is None:
        raise Unavailable("found no Java or no home directory: install Java 17 or later, or set JAVA_HOME and HOME")
    folder, name = location
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as making:
        made = Path(making) / "archive"
        done = subprocess.run(
            [sys.executable, __file__, "--into", str(made)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode or not made.is_file():
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise Unavailable(
                f"Java created no archive of classes; sessions start without it. Its output: {said[0]} … {said[-1]}"
            )
        with made.open("rb") as file:
            os.fsync(file.fileno())
        return made.replace(folder / f"{name}-{made.stat().st_size}.jsa")


def _run_session(into: Path) -> None:
    """Run a session whose Java process writes the archive at exit, and wait for this process."""
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import functions as F

    from coranto_consumers.spark import new_session, register

    option = {"spark.driver.defaultJavaOptions": f'"-XX:ArchiveClassesAtExit={into}" {SILENT}'}
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
    outgoing = parsed.where("id > 5").select(F.col("k").cast("binary"), F.to_json(F.struct("id", "k")).alias("value"))
    outgoing.mapInArrow(_unchanged, outgoing.schema).collect()
    spark.createDataFrame(pa.table({"id": [1]})).coalesce(1).unionByName(spark.range(1)).count()
    spark.stop()
    java: Any = SparkContext._gateway.proc  # type: ignore[union-attr]
    SparkContext._gateway.shutdown()  # type: ignore[union-attr]
    java.stdin.close()
    java.wait(_TIMEOUT)


def _unchanged(batches: Any) -> Any:
    return batches


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into is not None:
        _run_session(arguments.into)
        return 0
    if find_archive() is not None:
        return 0
    sys.stdout.write("Creating an archive of Spark's classes; sessions start in half the time with it …\n")
    sys.stdout.flush()
    try:
        make_archive()
    except (CorantoError, OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
