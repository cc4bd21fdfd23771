"""An HTTP server of objects, like the signed URLs of an object store. It counts fetches."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class HttpStore:
    """Serves `objects`, by path: the body and its content encoding (empty for none). A context manager."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.fetched: Counter[str] = Counter()
        """The number of fetches of each path."""
        self.accepted: list[str | None] = []
        """The header `Accept-Encoding` of each request."""
        self._server = _HttpServer(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def fetched_bytes(self) -> int:
        return sum(len(self.objects[path][0]) * count for path, count in self.fetched.items())

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, store: HttpStore) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self.counting = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _HttpServer)
        found = server.store.objects.get(self.path)
        with server.counting:
            server.store.accepted.append(self.headers["Accept-Encoding"])
            if found is not None:
                server.store.fetched[self.path] += 1
        if found is None:
            self.send_error(403, "the signature has expired")
            return
        body, encoding = found
        self.send_response(200)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests need no access log."""
