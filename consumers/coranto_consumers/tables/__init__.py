"""Tables without code: a file defines the messages to read, and the table to write.

`run_table` runs in a shard of this process or on Spark. `coranto table` is its command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.lazy import lazy_names

if TYPE_CHECKING:
    from coranto_consumers.tables.running import run_table
    from coranto_consumers.tables.runs import RunOptions, TableReport
    from coranto_consumers.tables.spec import TableSpec, read_table

__getattr__ = lazy_names(
    __name__,
    {
        "RunOptions": "coranto_consumers.tables.runs",
        "TableReport": "coranto_consumers.tables.runs",
        "TableSpec": "coranto_consumers.tables.spec",
        "read_table": "coranto_consumers.tables.spec",
        "run_table": "coranto_consumers.tables.running",
    },
)

__all__ = ["RunOptions", "TableReport", "TableSpec", "read_table", "run_table"]
