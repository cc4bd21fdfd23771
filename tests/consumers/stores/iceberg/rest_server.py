"""A REST catalog for tests: Iceberg's protocol over HTTP, backed by a SQL catalog of pyiceberg on SQLite.

It checks requirements and applies updates with pyiceberg's own models. Tests inject faults of commit requests.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog.rest import Capability, CreateTableRequest, RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

Answer = tuple[int, dict[str, Any] | None]
"""A status and a document."""
Fault = Callable[[Callable[[], Answer]], Answer]
"""A handler of a request: it gets a function that executes the request, and returns the client's response."""
_ENDPOINTS = sorted(str(each) for name, each in vars(Capability).items() if "TABLE" in name or "NAMESPACE" in name)
_REFUSALS = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}


class CutOff(Exception):
    """The connection breaks before the response."""


class RestServer:
    """A catalog's server on its own port."""

    def __init__(self, folder: Path) -> None:
        self.faults: deque[Fault] = deque()
        """Faults of the next commit requests. Later requests are executed."""
        self._clients: list[RestCatalog] = []
        self._sql = SqlCatalog("lake", uri=f"sqlite:///{folder}/rest.db", warehouse=f"file://{folder}")
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def catalog(self) -> RestCatalog:
        """Return a separate client, as in a separate process."""
        self._clients.append(RestCatalog("lake", uri=self.url))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client._session.close()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._sql.engine.dispose()

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Execute a request."""
        match method, *[unquote(part) for part in urlsplit(path).path.strip("/").split("/")]:
            case "GET", "v1", "config":
                return 200, {"defaults": {}, "overrides": {}, "endpoints": _ENDPOINTS}
            case "POST", "v1", "namespaces":
                self._sql.create_namespace(tuple(json.loads(body)["namespace"]))
                return 200, json.loads(body)
            case (("GET" | "HEAD"), "v1", "namespaces", space):
                return 200, {"namespace": [space], "properties": self._sql.load_namespace_properties(space)}
            case "POST", "v1", "namespaces", space, "tables":
                absent = {"location": None, "partition-spec": None, "write-order": None}
                return self._create((space,), CreateTableRequest.model_validate({**absent, **json.loads(body)}))
            case "GET", "v1", "namespaces", space, "tables", name:
                return _loaded(self._sql.load_table((space, name)))
            case "DELETE", "v1", "namespaces", space, "tables", name:
                self._sql.drop_table((space, name))
                return 204, None
            case "POST", "v1", "namespaces", space, "tables", name:
                fault = self.faults.popleft() if self.faults else carried_out
                return fault(lambda: self._respond(lambda: self._commit((space, name), body)))
        return 404, _error(404, "NoSuchEndpoint", path)

    def _create(self, space: tuple[str, ...], wanted: CreateTableRequest) -> Answer:
        create = self._sql._create_staged_table if wanted.stage_create else self._sql.create_table
        return _loaded(
            create(
                (*space, wanted.name),
                wanted.table_schema,
                wanted.location,
                wanted.partition_spec or UNPARTITIONED_PARTITION_SPEC,
                wanted.write_order or UNSORTED_SORT_ORDER,
                wanted.properties,
            )
        )

    def _commit(self, identifier: tuple[str, ...], body: bytes) -> Answer:
        request = CommitTableRequest.model_validate_json(body)
        table: Any = SimpleNamespace(name=lambda: identifier)
        with self._lock:
            done = self._sql.commit_table(table, request.requirements, request.updates)
        return 200, json.loads(done.model_dump_json())

    def _respond(self, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except tuple(_REFUSALS) as error:
            status = _REFUSALS[type(error)]
            return status, _error(status, type(error).__name__, str(error))

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    status, document = server._respond(lambda: server.answer(self.command, self.path, body))
                except CutOff:
                    self.close_connection = True
                    return
                content = b"" if document is None or self.command == "HEAD" else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        return Handler


@contextmanager
def rest_server(folder: Path) -> Iterator[RestServer]:
    """Run a server, with its tables in a folder."""
    server = RestServer(folder)
    try:
        yield server
    finally:
        server.close()


def carried_out(carry_out: Callable[[], Answer]) -> Answer:
    return carry_out()


def lost(carry_out: Callable[[], Answer]) -> Answer:
    """Execute a request and lose the response."""
    carry_out()
    raise CutOff


def _loaded(table: Table) -> Answer:
    metadata = json.loads(table.metadata.model_dump_json())
    return 200, {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


def _error(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": status}}


def status_only(status: int) -> Answer:
    """Return the response of a server or proxy with only a status."""
    return status, _error(status, "Status", f"status {status}")
