"""The parent of a local session's Python workers.

Spark forks its workers from a daemon, and ends those that were idle for a minute. This daemon has imported what workers
need before it forks, so that only the first worker of a session waits for that. Spark starts it as a module, in place
of `pyspark.daemon` (setting `spark.python.daemon.module`).
"""

from __future__ import annotations


def main() -> None:
    from pyspark.daemon import manager

    import coranto_consumers.spark.source
    import coranto_consumers.spark.tasks  # noqa: F401

    manager()


if __name__ == "__main__":
    main()
