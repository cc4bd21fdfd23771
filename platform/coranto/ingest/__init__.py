"""Ingest: rows of other systems become events of a stream, exactly once.

A file defines an ingest: the source of rows and the stream (`spec.py`). `Ingest` and the command `coranto ingest` run
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.lazy import lazy_names

if TYPE_CHECKING:
    from coranto.ingest.blocking import run_ingest
    from coranto.ingest.engine import Ingest
    from coranto.ingest.metrics import IngestMetrics
    from coranto.ingest.opening import open_source
    from coranto.ingest.runs import IngestReport
    from coranto.ingest.source import Poison, Read, RowSource, SourceRow
    from coranto.ingest.spec import IngestSpec, read_spec

__getattr__ = lazy_names(
    __name__,
    {
        "Ingest": "coranto.ingest.engine",
        "IngestMetrics": "coranto.ingest.metrics",
        "IngestReport": "coranto.ingest.runs",
        "IngestSpec": "coranto.ingest.spec",
        "Poison": "coranto.ingest.source",
        "Read": "coranto.ingest.source",
        "SourceRow": "coranto.ingest.source",
        "RowSource": "coranto.ingest.source",
        "open_source": "coranto.ingest.opening",
        "read_spec": "coranto.ingest.spec",
        "run_ingest": "coranto.ingest.blocking",
    },
)

__all__ = [
    "Ingest",
    "IngestMetrics",
    "IngestReport",
    "IngestSpec",
    "Poison",
    "Read",
    "RowSource",
    "SourceRow",
    "open_source",
    "read_spec",
    "run_ingest",
]
