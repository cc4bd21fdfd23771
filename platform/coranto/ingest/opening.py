"""The source that an ingest's file names. A source's libraries are imported only if it is used."""

from __future__ import annotations

from pathlib import Path

from coranto.extras import explained, require
from coranto.ingest.files.options import FileOptions
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.source import RowSource
from coranto.ingest.spec import IngestSpec


def open_source(spec: IngestSpec, file_root: Path | None = None) -> RowSource:
    """Return the source of an ingest. `file:///` folders are below `file_root`, by default the root of the machine.

    Raises MissingExtra if its libraries are not installed.
    """
    options = spec.options
    try:
        if isinstance(options, FileOptions):
            from coranto.ingest.files.source import FileSource

            return FileSource(options, file_root or Path("/"))
        if isinstance(options, PostgresOptions):
            require("postgres", "psycopg")
            from coranto.ingest.postgres.source import PostgresSource

            return PostgresSource(options, spec.name)
        from coranto.ingest.kafka.source import KafkaSource

        return KafkaSource(options)
    except ModuleNotFoundError as error:
        raise explained(error) from error
