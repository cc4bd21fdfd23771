"""`python -m benchmarks [NAME …]`: run the named benchmarks, or all of them."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from benchmarks import (
    allocator,
    append,
    append_stream,
    changes,
    consuming,
    dagster_sensors,
    endurance,
    kafka_to_table,
    lake,
    large_cluster,
    latency,
    many_journals,
    messages,
    overload,
    quotas,
    read,
    spark_consumer,
    spark_driver,
    spark_fetching,
    spark_kafka,
    spark_parsing,
    spark_sink,
    spark_source,
    streams,
    webhooks,
)
from benchmarks.runner import Figure, report
from coranto.errors import CorantoError, InvalidInput
from coranto.process.memory import keep_freed_memory

Benchmark: TypeAlias = Callable[[int], list[Figure]]

BENCHMARKS: Mapping[str, Benchmark] = {
    "allocator": allocator.run,
    "append": append.run,
    "append_replicated": append.run_replicated,
    "append_stream": append_stream.run,
    "changes": changes.run,
    "consuming": consuming.run,
    "dagster": dagster_sensors.run,
    "endurance": endurance.run,
    "lake": lake.run,
    "large_cluster": large_cluster.run,
    "latency": latency.run,
    "many_journals": many_journals.run,
    "messages": messages.run,
    "overload": overload.run,
    "quotas": quotas.run,
    "read": read.run,
    "recovery": consuming.run_recovery,
    "spark_consumer": spark_consumer.run,
    "spark_driver": spark_driver.run,
    "spark_fetching": spark_fetching.run,
    "spark_parsing": spark_parsing.run,
    "spark_sink": spark_sink.run,
    "spark_source": spark_source.run,
    "streams": streams.run,
    "webhooks": webhooks.run,
}


KAFKA_BENCHMARKS: Mapping[str, Benchmark] = {
    "kafka_to_table": kafka_to_table.run,
    "spark_sink": spark_kafka.run_sink,
    "spark_source": spark_kafka.run_source,
}
"""The benchmarks that `--kafka` runs. Without it, no benchmark downloads or starts Kafka."""


def chosen(names: Sequence[str], *, kafka: bool) -> dict[str, Benchmark]:
    """Return the benchmarks with these names, or all of them, by the names of their results. Raises InvalidInput."""
    offered = KAFKA_BENCHMARKS if kafka else BENCHMARKS
    if unknown := sorted(set(names) - offered.keys()):
        kind = " that compares with Kafka" if kafka else ""
        raise InvalidInput(f"no benchmark{kind} is named {', '.join(unknown)}; there are {', '.join(offered)}")
    chosen = {name: offered[name] for name in names or offered}
    return {f"{name}_kafka" if name in BENCHMARKS and kafka else name: each for name, each in chosen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--rounds", type=int, default=3, help="counted pairs of each measure (default 3)")
    parser.add_argument(
        "--kafka",
        action="store_true",
        help=f"compare {', '.join(KAFKA_BENCHMARKS)} with Kafka instead, which Maven and pip download into the cache",
    )
    arguments = parser.parse_args()
    try:
        benchmarks = chosen(arguments.names, kafka=arguments.kafka)
    except InvalidInput as error:
        parser.error(error.message)
    # On SIGTERM, exit normally, so that a benchmark stops its cluster and removes its files.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    keep_freed_memory()  # As the servers do. Otherwise figures would vary with the memory that the allocator keeps.
    for name, run in benchmarks.items():
        try:
            figures = run(arguments.rounds)
        except CorantoError as error:
            if not arguments.kafka:
                raise
            sys.exit(f"{name}: {error}")
        print(f"wrote {report(name, figures)}\n")


if __name__ == "__main__":
    main()
