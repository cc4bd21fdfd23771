"""The parent of a local session's Python workers.

Spark forks its workers from a daemon, and ends those that were idle for a minute. This daemon has imported what workers
need before it forks, so that only the first worker of a session waits for that. Spark starts it as a module, in place
of `pyspark.daemon` (setting `spark.python.daemon.module`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

IMPORTED: Final = (
    "pandas",  # Spark's workers import it with their first task.
    "pyarrow.json",
    "pyspark.worker",
    "coranto_consumers.spark.source",
    "coranto_consumers.spark.tasks",
)


def main() -> None:
    from pyspark.daemon import manager

    list(map(import_module, IMPORTED))
    manager()


if __name__ == "__main__":
    main()
