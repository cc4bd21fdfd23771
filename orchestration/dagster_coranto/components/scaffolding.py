"""The files that `dg scaffold defs dagster_coranto.…` writes."""

from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field

from coranto.fragments.windows import DEFAULT_MAX_WINDOWS, DEFAULT_WINDOW_BYTES

_TREE = """\
# The journals and their settings. Apply changes by materialising the asset `{asset}`.
name: {folder}/
replication: 1
labels: [{{name: content-type, value: application/x-ndjson}}]
fragment: {{length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 10s}}
children:
- name: {folder}/part-000
"""


class CollectionParams(BaseModel):
    """Options of `dg scaffold defs dagster_coranto.JournalCollectionComponent`."""

    folder: str = Field(description="Folder of the journals, such as shop/orders. A tree with one journal is written.")
    endpoint: str = Field(default="", description="Brokers, as host:port. Default: from the environment.")


class JournalCollectionScaffolder(dg.Scaffolder[CollectionParams]):
    """Writes a collection of the journals of one folder, and a tree of their specs."""

    @classmethod
    def get_scaffold_params(cls) -> type[CollectionParams]:
        return CollectionParams

    def scaffold(self, request: dg.ScaffoldRequest[CollectionParams]) -> None:
        folder = request.params.folder.strip("/")
        asset = f"{_identifier(folder)}_specs"  # A project may have several collections.
        attributes: dict[str, Any] = {
            "selector": f"name:prefix={folder}/",
            "specs": "journals.yaml",
            "specs_asset": asset,
        }
        if request.params.endpoint:
            attributes["cluster"] = {"endpoint": request.params.endpoint}
        dg.scaffold_component(request, attributes)
        tree = Path(request.target_path) / "journals.yaml"
        if not tree.exists():
            tree.write_text(_TREE.format(folder=folder, asset=asset))


class ConsumerParams(BaseModel):
    """Options of `dg scaffold defs` for consumers."""

    application: str = Field(description="The application's class, as module:Class.")
    source: str = Field(description="Folder of the journals to read, such as shop/orders.")
    table: str = Field(description="Table that the application maintains.")


class SparkConsumerParams(ConsumerParams):
    """Options of `dg scaffold defs dagster_coranto.SparkConsumerComponent`."""

    windows: bool = Field(default=False, description="Partition the table by windows of offsets, to backfill.")


class SparkConsumerScaffolder(dg.Scaffolder[SparkConsumerParams]):
    """Writes a consumer of one folder of journals that maintains one table, continuously or by windows."""

    @classmethod
    def get_scaffold_params(cls) -> type[SparkConsumerParams]:
        return SparkConsumerParams

    def scaffold(self, request: dg.ScaffoldRequest[SparkConsumerParams]) -> None:
        params = request.params
        attributes: dict[str, Any] = {
            "name": f"consume_{params.table}",
            "application": params.application,
            "sources": [params.source.strip("/")],
            "tables": [{"key": params.table}],
            "store_url_variable": "CORANTO_STORE_URL",
        }
        if params.windows:
            attributes["windows"] = {"window_bytes": DEFAULT_WINDOW_BYTES, "max_windows": DEFAULT_MAX_WINDOWS}
        else:
            attributes["sensor_seconds"] = 30
        dg.scaffold_component(request, attributes)


_SHARDS = """\
# The shards of {application}, one for each journal that it reads. Apply changes by materialising `{asset}`.
common:
  max_txn_duration: 1s
  labels: [{{name: app, value: {app}}}]
shards:
- id: {app}-000
  sources: [{{journal: {source}/part-000}}]
"""


class ShardConsumerScaffolder(dg.Scaffolder[ConsumerParams]):
    """Writes a consumer of shards that reads one folder of journals and maintains one table."""

    @classmethod
    def get_scaffold_params(cls) -> type[ConsumerParams]:
        return ConsumerParams

    def scaffold(self, request: dg.ScaffoldRequest[ConsumerParams]) -> None:
        params = request.params
        app = params.table.replace("/", "-")
        source = params.source.strip("/")
        asset = f"{_identifier(app)}_shards"
        attributes = {
            "specs": "shards.yaml",
            "specs_asset": asset,
            "sources": [source],
            "tables": [{"key": params.table}],
            "prune_selector": f"app={app}",
        }
        dg.scaffold_component(request, attributes)
        document = Path(request.target_path) / "shards.yaml"
        if not document.exists():
            document.write_text(_SHARDS.format(application=params.application, asset=asset, app=app, source=source))


_INGEST = """\
# Rows of these files become events of the stream {stream}, each once. `source` may be `kafka` or `postgres`, too.
name: {name}
stream: {stream}
source:
  files: {{url: "{url}", pattern: "*.jsonl"}}
create: {{segments: 4}}
"""


class IngestParams(BaseModel):
    """Options of `dg scaffold defs dagster_coranto.IngestComponent`."""

    stream: str = Field(description="The stream that is written, such as shop/orders. It is created if it is missing.")
    url: str = Field(default="file:///data/", description="The folder of the files that are read.")


class IngestScaffolder(dg.Scaffolder[IngestParams]):
    """Writes an ingest of files of JSON into one stream."""

    @classmethod
    def get_scaffold_params(cls) -> type[IngestParams]:
        return IngestParams

    def scaffold(self, request: dg.ScaffoldRequest[IngestParams]) -> None:
        stream = request.params.stream.strip("/")
        name = _identifier(stream)[:40]
        dg.scaffold_component(request, {"file": "ingest.yaml", "sensor_seconds": 30})
        file = Path(request.target_path) / "ingest.yaml"
        if not file.exists():
            file.write_text(_INGEST.format(name=name, stream=stream, url=request.params.url))


_TABLE = """\
# The messages of the stream {stream} become rows of the table {table}, each once.
name: {name}
input: {{stream: {stream}}}
columns: {columns}
store: ${{CORANTO_STORE_URL}}
table: {table}
"""


class TableParams(BaseModel):
    """Options of `dg scaffold defs dagster_coranto.JournalTableComponent`."""

    stream: str = Field(description="The stream that is read, such as shop/orders.")
    table: str = Field(description="The table that is written. It is created if it is missing.")
    columns: str = Field(description="The fields of the messages, such as `id BIGINT, customer STRING`.")


class TableScaffolder(dg.Scaffolder[TableParams]):
    """Writes a table of the events of one stream, in the store of $CORANTO_STORE_URL."""

    @classmethod
    def get_scaffold_params(cls) -> type[TableParams]:
        return TableParams

    def scaffold(self, request: dg.ScaffoldRequest[TableParams]) -> None:
        params = request.params
        dg.scaffold_component(request, {"table": "table.yaml", "sensor_seconds": 30})
        file = Path(request.target_path) / "table.yaml"
        if not file.exists():
            given = {"stream": params.stream.strip("/"), "table": params.table, "columns": params.columns}
            file.write_text(_TABLE.format(name=f"table-{params.table}", **given))


def _identifier(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)
