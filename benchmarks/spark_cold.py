"""The first read of a new Spark session: `python -m benchmarks.spark_cold REQUEST`.

REQUEST is a JSON object with `format`, its `options`, the session's `settings`, and the expected number of `rows`. The
program prints the seconds of the first read, from `load()` to the answer. A process starts only one JVM, so each such
read needs a separate process.
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.spark_reads import TimedRead, parsed_rows
from coranto_consumers.spark.session.sessions import new_session


def main() -> None:
    request = json.loads(sys.argv[1])
    spark = new_session("bench", master="local[2]", settings=request["settings"])
    try:
        begun = time.perf_counter()
        TimedRead(request["rows"], lambda: parsed_rows(spark, request["format"], request["options"]))()
        print(time.perf_counter() - begun)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
