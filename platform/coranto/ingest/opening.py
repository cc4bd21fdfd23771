"""Opening of an ingest and its source. The libraries of a source are imported only if the source is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coranto.client.client import JournalClient
from coranto.extras import require, with_install_advice
from coranto.ingest.engine import Ingest
from coranto.ingest.files.options import FileOptions
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.runs import RunningIngest
from coranto.ingest.source import Positions, RowSource
from coranto.ingest.spec import IngestSpec
from coranto.ingest.webhook.options import WebhookOptions


def open_ingest(client: JournalClient, spec: IngestSpec, *, accept_loss: bool = False) -> RunningIngest:
    """Return an ingest. Raises MissingExtra if the libraries of its source are not installed."""
    if isinstance(spec.options, WebhookOptions):
        require("webhook", "aiohttp")
        from coranto.ingest.gateway.service import WebhookIngest

        return WebhookIngest(client, spec, accept_loss=accept_loss)
    return Ingest(client, spec, open_source(spec), accept_loss=accept_loss)


async def lag_of(spec: IngestSpec, positions: Positions) -> Mapping[str, int]:
    """Return the lag of each split (see `RowSource.lag`). Empty for webhooks, which have no lag."""
    return {} if isinstance(spec.options, WebhookOptions) else await open_source(spec).lag(positions)


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
        raise with_install_advice(error) from error
