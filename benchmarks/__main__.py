"""`python -m benchmarks [NAME …]`: run the named benchmarks, or all of them."""

from __future__ import annotations

import argparse
import signal
import sys

from benchmarks import (
    allocator,
    append,
    append_stream,
    consuming,
    dagster_sensors,
    endurance,
    front_ends,
    lake,
    large_cluster,
    latency,
    many_journals,
    messages,
    read,
    spark_consumer,
    spark_driver,
    spark_fetching,
    spark_sink,
    spark_source,
    streams,
)
from benchmarks.runner import report
from coranto.process.memory import keep_freed_memory

BENCHMARKS = {
    "allocator": allocator.run,
    "append": append.run,
    "append_replicated": append.run_replicated,
    "append_stream": append_stream.run,
    "consuming": consuming.run,
    "dagster": dagster_sensors.run,
    "endurance": endurance.run,
    "front_ends": front_ends.run,
    "lake": lake.run,
    "large_cluster": large_cluster.run,
    "latency": latency.run,
    "many_journals": many_journals.run,
    "messages": messages.run,
    "read": read.run,
    "recovery": consuming.run_recovery,
    "spark_consumer": spark_consumer.run,
    "spark_driver": spark_driver.run,
    "spark_fetching": spark_fetching.run,
    "spark_sink": spark_sink.run,
    "spark_source": spark_source.run,
    "streams": streams.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--rounds", type=int, default=3, help="counted pairs of each measure (default 3)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    # On SIGTERM, exit in order, so that a benchmark ends its cluster and removes its files.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    keep_freed_memory()  # As the servers do. Otherwise chance would decide whether memory is kept, and so the figures.
    for name in arguments.names or BENCHMARKS:
        path = report(name, BENCHMARKS[name](arguments.rounds))
        print(f"wrote {path}\n")


if __name__ == "__main__":
    main()
