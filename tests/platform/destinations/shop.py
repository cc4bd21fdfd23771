"""A shop's REST API on a local server, dlt's REST source that reads it, and the destination's messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dlt
from dlt.sources.rest_api import rest_api_source

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.messages.framing import JsonLines
from coranto_consumers.tables import RunOptions, TableReport, read_table, run_table

DATASET = "shop_data"
_PAGE = 20


class Shop:
    """Lists of objects by name, each a list of pages at `/NAME?page=N&since=ID`."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.url = ""

    def answer(self, target: str) -> list[dict[str, Any]]:
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        since, page = (int(query.get(name, ["0"])[0]) for name in ("since", "page"))
        found = [row for row in self.rows[parts.path.strip("/")] if row["version"] > since]
        return found[page * _PAGE : (page + 1) * _PAGE]


@contextmanager
def serving() -> Iterator[Shop]:
    shop = Shop()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(shop.answer(self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    shop.url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield shop
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def source(url: str, *names: str, disposition: str = "append", columns: Mapping[str, Any] | None = None) -> Any:
    """dlt's REST source of these lists. Rows whose version is above the last one are read."""
    paginator = {"type": "page_number", "base_page": 0, "total_path": None}
    cursor = {"cursor_path": "version", "initial_value": 0, "start_param": "since"}
    resources = [
        {
            "name": name,
            "primary_key": "id",
            "write_disposition": disposition,
            "columns": dict(columns or {}),
            "endpoint": {"path": name, "paginator": paginator, "incremental": cursor},
        }
        for name in names
    ]
    return rest_api_source({"client": {"base_url": url}, "resources": resources}, name="shop")


def pipeline(folder: Path, name: str = "shop", **options: Any) -> Any:
    """A pipeline whose working folder is below `folder`."""
    given = {"destination": "coranto.destinations.coranto", "dataset_name": DATASET, **options}
    return dlt.pipeline(name, pipelines_dir=str(folder), **given)


def messages(client: SyncJournalClient, table: str) -> list[dict[str, Any]]:
    """The committed messages of a table, without UUIDs."""
    return [
        {name: value for name, value in each.message.items() if name != "_meta"}
        for info in client.list(f"name:prefix={DATASET}/{table}/").journals
        for each in committed_messages(client, info.spec.name, JsonLines())
    ]


def loaded(endpoint: str, store: str, table: str, columns: str, *lines: str) -> TableReport:
    """Run `coranto table` once over a table of the dataset."""
    head = f"name: of-{table}\ninput: {{prefix: {DATASET}/{table}/, keyed: true}}\n"
    text = f"{head}columns: {columns}\nstore: {store}\ntable: {table}\n"
    return run_table(ClientConfig(endpoint), read_table(text + "\n".join(lines)), RunOptions(once=True))
