"""The parent of a local session's Python workers, in place of `pyspark.daemon` (`spark.python.daemon.module`).

It imports the workers' modules before it forks, so that only a session's first worker waits for the imports. Workers
collect garbage after each task. The parent's objects are excluded, which saves 50 ms per task, and freed memory is kept
for later blocks. The command's argument is the workers' module: one for tasks, and one for each step of planning a
read.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Final

from coranto.process.memory import keep_freed_memory

TASKS: Final = "pyspark.worker"
IMPORTED: Final = (
    "pandas",  # Spark's workers import it with their first task.
    "pyarrow.json",
    TASKS,
    "coranto_consumers.spark.source.data_source",
    "coranto_consumers.spark.outputs.tasks",
)


def imported_for(module: str) -> tuple[str, ...]:
    """Return the modules to import for workers that run `module`. Planning needs fewer modules than tasks."""
    return IMPORTED if module == TASKS else (module, "coranto_consumers.spark.source.data_source")


def main() -> None:
    from pyspark.daemon import manager

    list(map(import_module, imported_for(sys.argv[1] if len(sys.argv) > 1 else TASKS)))
    gc.freeze()
    keep_freed_memory()
    manager()


if __name__ == "__main__":
    main()
