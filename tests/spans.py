"""Spans for tests: a tracer provider of OpenTelemetry's SDK that keeps spans in memory, or a receiver of OTLP/HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler


class Spans:
    """The spans that ended while the provider was set."""

    def __init__(self, sampler: Sampler) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def all(self) -> Sequence[Any]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[Any]:
        """Return the spans with a name, in the order of their ends."""
        return [span for span in self.all if span.name == name]

    def within(self, span: Any) -> list[Any]:
        """Return the direct children of a span."""
        inside = [each for each in self.all if each.parent is not None and each.parent.span_id == span.context.span_id]
        return sorted(inside, key=lambda each: (each.start_time, each.name))

    def tree(self, span: Any) -> tuple[Any, ...]:
        """Return a span's name and kind, and the trees of its children."""
        return (f"{span.name} {span.kind.name}", *(self.tree(each) for each in self.within(span)))


@contextmanager
def recorded_spans(sampler: Sampler = ALWAYS_ON) -> Iterator[Spans]:
    """Set a tracer provider during the block. OpenTelemetry's public function would set it until the process ends."""
    spans = Spans(sampler)
    with patch.object(trace, "_TRACER_PROVIDER", spans.provider):
        yield spans
    spans.provider.shutdown()


class Receiver:
    """A server of OTLP/HTTP that keeps the spans it receives, as (service, instance, span)."""

    def __init__(self) -> None:
        received: list[tuple[str, str, Any]] = []
        self.received = received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for each in request.resource_spans:
                    facts = {fact.key: fact.value.string_value for fact in each.resource.attributes}
                    place = facts["service.name"], facts.get("service.instance.id", "")
                    received.extend((*place, span) for scope in each.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
