"""A Schema Registry in this process."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import descriptor_pb2


class Registry:
    """The part of a Schema Registry's interface that clients use, with schemas in memory."""

    def __init__(self) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.subjects: dict[str, int] = {}
        self.status = 200
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                return None

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = len(registry.schemas) + 1
                registry.schemas[number] = body
                self.answer(200, {"id": number})

            def do_GET(self) -> None:
                parts = self.path.partition("?")[0].strip("/").split("/")
                if registry.status != 200:
                    self.answer(registry.status, {"error_code": registry.status, "message": "not now"})
                elif parts[:2] == ["schemas", "ids"] and int(parts[2]) in registry.schemas:
                    self.answer(200, registry.schemas[int(parts[2])])
                elif parts[0] == "subjects" and parts[1] in registry.subjects:
                    number = registry.subjects[parts[1]]
                    self.answer(200, {"subject": parts[1], "id": number, "version": 1, **registry.schemas[number]})
                else:
                    self.answer(404, {"error_code": 40403, "message": "Schema not found"})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.options = {"url": f"http://127.0.0.1:{self.server.server_address[1]}"}

    def add(self, file: descriptor_pb2.FileDescriptorProto, **references: str) -> int:
        """Register a Protobuf file. `references` are the subjects of imported files, by name."""
        number = len(self.schemas) + 1
        self.schemas[number] = {
            "schema": base64.b64encode(file.SerializeToString()).decode(),
            "schemaType": "PROTOBUF",
            "references": [{"name": name, "subject": subject, "version": 1} for name, subject in references.items()],
        }
        return number


@contextmanager
def running() -> Iterator[Registry]:
    """Run a registry within the context."""
    registry = Registry()
    thread = threading.Thread(target=registry.server.serve_forever)
    thread.start()
    try:
        yield registry
    finally:
        registry.server.shutdown()
        thread.join()
        registry.server.server_close()
